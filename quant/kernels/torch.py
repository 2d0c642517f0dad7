"""torch's own low-bit products, for environments without vLLM.

int8 codes go through `torch._int_mm` (exact int32 sums), fp8 through `torch._scaled_mm` (fp32 sums), int4 through
`torch._weight_int4pack_mm_for_cpu` on CPUs. Scales multiply afterwards in fp32.
Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quant.activations import quantize_activation
from quant.kernels.select import KernelError
from quant.materialize import LowBitWeight
from quant.schemes import is_integer


class TorchProduct:
    """y = multiply(x) + b. name: the torch operator."""

    def __init__(self, name: str, multiply: Callable[[torch.Tensor], torch.Tensor], bias: torch.Tensor | None):
        self.name = name
        self._multiply = multiply
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        y = self._multiply(x)
        return y if self._bias is None else y + self._bias


def torch_product(layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> TorchProduct:
    """The torch operator for this weight's scheme. Raises `KernelError` naming layer and reason where none fits."""
    scheme = weight.scheme
    if scheme.weights is None:
        return TorchProduct("linear", lambda x: F.linear(x, weight.codes), bias)
    if scheme.activations is None:
        return TorchProduct("_weight_int4pack_mm_for_cpu", _int4_multiply(layer, weight), bias)
    if is_integer(scheme.activations):
        return TorchProduct("_int_mm", _int8_multiply(weight), bias)
    return TorchProduct("_scaled_mm", _fp8_multiply(weight), bias)


def _int4_multiply(layer: str, weight: LowBitWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    group = weight.scheme.group_size
    assert weight.scale is not None
    if weight.codes.device.type != "cpu":
        raise KernelError(
            f"layer {layer!r}: kernel 'torch' has no int4 product on {weight.codes.device.type}; use 'vllm'"
        )
    if group not in (32, 64, 128, 256) or weight.shape[0] % 16:
        raise KernelError(
            f"layer {layer!r}: torch's int4 product takes group sizes 32, 64, 128, 256 and output rows in multiples "
            f"of 16, not group {group} and {weight.shape[0]} rows; use kernel 'vllm' or 'reference'"
        )
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((weight.unpacked().to(torch.int32) + 8), 1)
    scale = weight.scale.t().contiguous()
    # The operator computes (code - 8) · scale + zero.
    scales_and_zeros = torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales_and_zeros)


def _int8_multiply(weight: LowBitWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    codes = weight.codes.t()
    assert weight.scale is not None
    scale = weight.scale.to(torch.float32).t()

    def multiply(x: torch.Tensor) -> torch.Tensor:
        low_bit = quantize_activation(x, weight.scheme)
        return (torch.ops.aten._int_mm(low_bit.codes, codes) * low_bit.scale * scale).to(x.dtype)

    return multiply


def _fp8_multiply(weight: LowBitWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    codes = weight.codes.t()
    assert weight.scale is not None
    scale = weight.scale.to(torch.float32).t()
    one = torch.ones((), dtype=torch.float32, device=codes.device)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        low_bit = quantize_activation(x, weight.scheme)
        y = torch.ops.aten._scaled_mm(low_bit.codes, codes, scale_a=one, scale_b=one, out_dtype=torch.float32)
        return (y * low_bit.scale * scale).to(x.dtype)

    return multiply
