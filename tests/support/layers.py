"""One low-bit layer, linear or of routed experts, and the textbook gradients that tests compare it
with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.schemes import get_scheme
from tests.support.tensors import heavy, normal

EXPERTS = "model.layers.1.mlp.experts"
SHAPE = ExpertsShape(5, 2, 128, 256, "silu", ExpertLayout())


def make_linear(
    scheme: str,
    kernel: str = "reference",
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, int] = (128, 256),
    bias: bool = True,
    seed: int = 0,
    master_dtype: torch.dtype = torch.float32,
    aligned: bool = True,
) -> LowBitLinear:
    master = nn.Parameter((heavy(*shape, seed=seed) * 0.05).to(master_dtype))
    bias_master = None
    if bias:
        bias_values = normal(shape[0], seed=seed + 9) * 0.3
        bias_master = nn.Parameter(bias_values.to(master_dtype))
    context = LayerContext(dtype, kernel, aligned)
    linear = LowBitLinear(
        "model.layers.1.mlp.up_proj", master, bias_master, get_scheme(scheme), context
    )
    linear.refresh()
    return linear


def dequantized_activation(
    x: torch.Tensor, layer: LowBitLinear | RoutedLowBitExperts
) -> torch.Tensor:
    """Return code · scale of an input, float64, or the input itself if the scheme does not quantize
    it.
    """
    if layer.scheme.activations is None:
        return x.double()
    low_bit = quantize_activation(x, layer.scheme)
    scale = low_bit.scale.double().repeat_interleave(
        x.shape[1] // low_bit.scale.shape[1],
        dim=1,
    )
    return low_bit.values().double() * scale


def layer_gradients(
    linear: LowBitLinear,
    x: torch.Tensor,
    dy: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradients of input, master and bias (if any) by the layer's own backward."""
    x = x.clone().requires_grad_()
    linear(x).backward(dy)
    return collected(x, linear.master, linear.bias)


@contextmanager
def kept_tensors() -> Iterator[list[torch.Tensor]]:
    """Collect what autograd keeps for the backward within this context."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def collected(*leaves: torch.Tensor | None) -> list[torch.Tensor]:
    gradients = [leaf.grad for leaf in leaves if leaf is not None]
    assert all(g is not None for g in gradients)
    return [g for g in gradients if g is not None]


def make_experts(
    scheme: str,
    kernel="reference",
    dtype=torch.bfloat16,
    shape=SHAPE,
    aligned=True,
    master_dtype=torch.float32,
) -> RoutedLowBitExperts:
    E = shape.experts
    H = shape.hidden
    inner = shape.intermediate
    gate_up_values = heavy(E, 2 * inner, H, seed=0, rows=False) * 0.06
    down_values = heavy(E, H, inner, seed=2, rows=False) * 0.04
    gate_up = nn.Parameter(gate_up_values.to(master_dtype))
    down = nn.Parameter(down_values.to(master_dtype))
    context = LayerContext(dtype, kernel, aligned)
    experts = RoutedLowBitExperts(EXPERTS, gate_up, down, shape, get_scheme(scheme), context)
    experts.refresh()
    return experts


def routed(
    tokens: int, shape: ExpertsShape = SHAPE, seed: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights, fp32 [N, K], that sum to one per token, and K different experts per token,
    int64 [N, K].
    """
    logits = normal(tokens, shape.experts, seed=seed)
    picked, index = logits.topk(shape.top_k, dim=-1)
    return picked.softmax(-1), index


def unpacked(low_bit: LowBitWeight) -> torch.Tensor:
    """Return code · scale, float64 [O, I]."""
    codes = low_bit.unpacked().double()
    if low_bit.scale is None:
        return codes
    scale = (
        low_bit.wide_scale()
        .double()
        .repeat_interleave(low_bit.shape[0] // low_bit.scale.shape[0], dim=0)
    )
    return codes * scale.repeat_interleave(low_bit.shape[1] // scale.shape[1], dim=1)


def as_multiplied(x: torch.Tensor, experts: RoutedLowBitExperts) -> torch.Tensor:
    """Return x, float64, rounded to the compute dtype and then quantized by its scheme's activation
    quantization.
    """
    x = x.to(experts.context.dtype)
    return dequantized_activation(x, experts) if experts.quantizes_activations else x.double()


def straight_through(value: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the value of `used` and the gradient of `value`."""
    return value + (used.to(value.dtype) - value).detach()


def textbook_gradients(
    experts: RoutedLowBitExperts, *inputs: torch.Tensor, activations: bool = True
) -> list[torch.Tensor]:
    """Return the gradients of x, routing weights and both masters by torch's autograd in float64
    through the detach trick.

    inputs: x, weights, index, dy. If `activations` is true, quantize them too; otherwise quantize
    only weights, to show that it matters.
    """
    x, weights, index, dy = inputs
    x = x.detach().double().requires_grad_()
    weights = weights.detach().double().requires_grad_()
    gate_up, down = (master.detach().double().requires_grad_() for master in experts.masters)
    y = torch.zeros(x.shape, dtype=torch.float64)

    def used(values: torch.Tensor) -> torch.Tensor:
        rounded = values.detach().to(experts.context.dtype)
        return straight_through(values, as_multiplied(rounded, experts) if activations else rounded)

    for e in range(experts.shape.experts):
        rows, slots = (index == e).nonzero(as_tuple=True)
        if experts.context.aligned:
            matrices = (
                unpacked(experts.codes().experts[e].gate_up),
                unpacked(experts.codes().experts[e].down),
            )
        else:
            matrices = (
                gate_up[e].to(experts.context.dtype),
                down[e].to(experts.context.dtype),
            )
        both = straight_through(gate_up[e], matrices[0])
        out = straight_through(down[e], matrices[1])
        merged = used(x[rows]) @ both.t()
        merged = straight_through(merged, merged.detach().to(experts.context.dtype))
        gate, up = merged.chunk(2, dim=-1)
        of_expert = used(F.silu(gate) * up) @ out.t()
        y = y.index_add(0, rows, of_expert * weights[rows, slots, None])
    y.backward(dy.double())
    return [leaf.grad for leaf in (x, weights, gate_up, down) if leaf.grad is not None]
