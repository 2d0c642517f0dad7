"""What stands for a GPU and for vLLM's kernels while launches are counted.

A product of vLLM's is one launch that reads its weight and its input and writes its output; quantizing the input is one
more; fused experts are those of `_EXPERTS`. What runs through torch.compile on a GPU is one launch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from qarl.bench.launches.tally import Tally, on_device
from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels import vllm_operators
from qarl.quant.materialize import LowBitWeight, cpu_dispatch
from qarl.quant.materialize.activations import LowBitActivation
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.schemes import Scheme

_EXPERTS = ("sort", "gate and up", "gate", "down", "sum")
"""Kernels of vLLM's fused experts: tokens by expert, two products, what is between them, the weighted sum."""


@dataclass(frozen=True)
class Product:
    """A `LowBitMatmul`. codes: bytes it reads of weights. rows: O."""

    tally: Tally
    codes: int
    rows: int
    scheme: Scheme
    name: str = "counted"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, I] → [N, O], without values."""
        y = x.new_empty((x.shape[0], self.rows))
        taken = _quantized(self.tally, self.scheme, x.nbytes)
        self.tally.launch("product", self.codes + taken + y.nbytes)
        return y


@dataclass(frozen=True)
class ExpertsProduct:
    """An `ExpertsMatmul`. codes: bytes it reads of weights."""

    tally: Tally
    codes: int
    shape: ExpertsShape
    scheme: Scheme
    name: str = "counted"

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `ExpertsMatmul`; without values."""
        y, k, columns = torch.empty_like(x), self.shape.top_k, self.shape.intermediate
        row = x.shape[0] * k * x.itemsize  # one column of all rows
        moved = {
            "sort": 4 * index.nbytes,
            "gate and up": _quantized(self.tally, self.scheme, x.nbytes) + 2 * row * columns + 2 * self.codes // 3,
            "gate": 3 * row * columns,
            "down": _quantized(self.tally, self.scheme, row * columns) + row * self.shape.hidden + self.codes // 3,
            "sum": row * self.shape.hidden + y.nbytes,
        }
        for kernel in _EXPERTS:
            self.tally.launch(f"experts: {kernel}", moved[kernel])
        return y


def _quantized(tally: Tally, scheme: Scheme, count: int) -> int:
    """Bytes that a product reads of its input. count: those of the input in 16 bits."""
    if scheme.activations is None:
        return count
    codes = count * scheme.activations.num_bits // 16
    tally.launch("quantize", count + codes)
    return codes


@dataclass(frozen=True)
class Products:
    """A `KernelFactory`, as the engine's layers are one."""

    tally: Tally

    def __call__(self, layer: str, weight: LowBitWeight, bias: Any) -> Product:
        """See `KernelFactory`."""
        return self.stacked(layer, [weight], [bias])

    def stacked(self, name: str, weights: Sequence[LowBitWeight], biases: Sequence[Any]) -> Product:
        """See `KernelFactory.stacked`."""
        rows = sum(weight.shape[0] for weight in weights)
        return Product(self.tally, sum(map(_bytes, weights)), rows, weights[0].scheme)

    def experts(self, layer: str, shape: ExpertsShape, weights: LowBitExperts) -> ExpertsProduct:
        """See `KernelFactory.experts`."""
        codes = sum(_bytes(expert.gate_up) + _bytes(expert.down) for expert in weights.experts)
        return ExpertsProduct(self.tally, codes, shape, weights.experts[0].down.scheme)


def _bytes(weight: LowBitWeight) -> int:
    return sum(tensor.nbytes for _, tensor in weight.tensors())


@contextmanager
def stand_in(tally: Tally) -> Iterator[None]:
    """Within this context tensors of the device "meta" say that they are on a GPU with vLLM and Triton."""
    one, generator, materializer = tally.one_kernel, torch.Generator, cpu_dispatch.materializer
    places: dict[str, Any] = {
        "torch.Tensor.is_cuda": property(on_device),
        "torch.Generator": lambda device=None: generator(),
        "torch.optim.optimizer._get_fused_kernels_supported_devices": lambda: ["meta", "cpu"],
        "torch.nn.utils.clip_grad._has_foreach_support": lambda tensors, device: True,
        "qarl.quant.materialize.cpu_dispatch.compiler_missing": lambda device: None,
        "qarl.learner.gradients.compiler_missing": lambda device: None,
        "qarl.quant.materialize.materializer": lambda scheme, dtype, device: materializer(scheme, dtype, _gpu(device)),
        "qarl.quant.materialize.compiled": one,
        "qarl.quant.layers.gradients.compiled": one,
        "qarl.quant.kernels.flash_attention._engine_version": lambda size: (
            None
        ),  # torch's stands for it: one launch too
        "qarl.quant.kernels.activations.engine_activation": one(_engine_activation),
        **{f"{vllm_operators.__name__}.{function.__name__}": one(function) for function in _OPERATORS},
    }
    with ExitStack() as stack:
        for place, value in places.items():
            stack.enter_context(patch(place, value, create=place.endswith(".is_cuda")))
        yield


def _gpu(device: torch.device) -> torch.device:
    return torch.device("cuda") if on_device(device) else device


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, added: bool) -> torch.Tensor:
    """Of `quant.kernels.vllm_operators`, as are the next; without values."""
    return torch.empty_like(x)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `rms_norm`."""
    return torch.empty_like(x)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `rms_norm`."""
    return torch.empty_like(gate)


def top_experts(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rms_norm`."""
    values, index = logits.to(torch.float32).topk(top_k)
    return values, index


_OPERATORS: tuple[Callable[..., Any], ...] = (rms_norm, rotary_embedding, silu_and_mul, top_experts)


def _engine_activation(x: torch.Tensor, integer: bool, symmetric: bool) -> LowBitActivation:
    codes = torch.empty_like(x, dtype=torch.int8 if integer else torch.float8_e4m3fn)
    return LowBitActivation(codes, x.new_empty((len(x), 1), dtype=torch.float32))
