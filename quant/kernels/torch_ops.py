"""torch's own low-bit products, for environments without vLLM.

| weights, activations | operator |
|---|---|
| int4, compute dtype | `_weight_int4pack_mm_for_cpu`; a Triton kernel on CUDA, where int8 has it too |
| int4, int8 asymmetric | `_dyn_quant_matmul_4bit` on CPUs, what vLLM multiplies with there; else `_int_mm` a group |
| int8, int8 | `_int_mm` (exact int32 sums) |
| fp8, fp8 and int4, fp8 | `_scaled_mm` (fp32 sums), once a group or block column |

Scales multiply afterwards in fp32. fp4 codes have no torch operator before Blackwell and are refused.
Axes: N tokens, O output rows, I input columns, Q quantization groups.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from qarl.quant.kernels.base import KernelError
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import LowBitActivation, quantize_activation
from qarl.quant.schemes import is_integer

Multiply = Callable[[torch.Tensor], torch.Tensor]


class TorchMatmul:
    """y = multiply(x) + b. name: the torch operator."""

    def __init__(self, name: str, multiply: Multiply, bias: torch.Tensor | None):
        self.name = name
        self._multiply = multiply
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        y = self._multiply(x)
        return y if self._bias is None else y + self._bias


def torch_matmul(layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> TorchMatmul:
    """The torch operator for this weight's scheme. Raises `KernelError` naming layer and reason where none fits."""
    args, activations = weight.scheme.weights, weight.scheme.activations
    if args is None:
        return TorchMatmul("linear", lambda x: F.linear(x, weight.codes), bias)
    if not is_integer(args) and args.num_bits == 4:
        raise KernelError(f"layer {layer!r}: kernel 'torch' has no fp4 product; use 'vllm' or 'reference'")
    if activations is None:
        return TorchMatmul(*_weight_only(layer, weight), bias)
    if is_integer(activations) and args.num_bits == 4 and weight.codes.device.type == "cpu":
        return TorchMatmul("_dyn_quant_matmul_4bit", _dynamic_int4_multiply(weight), bias)
    if is_integer(activations):
        return TorchMatmul("_int_mm", _grouped_multiply(weight, _int_mm), bias)
    return TorchMatmul("_scaled_mm", _grouped_multiply(weight, _scaled_mm), bias)


def _weight_only(layer: str, weight: LowBitWeight) -> tuple[str, Multiply]:
    args, device = weight.scheme.weights, weight.codes.device.type
    assert args is not None
    if device == "cuda":
        from qarl.quant.kernels.triton_wna16 import triton_multiply

        return "triton_wna16", triton_multiply(layer, weight)
    if device == "cpu" and args.num_bits == 4:
        return "_weight_int4pack_mm_for_cpu", _int4_multiply(layer, weight)
    raise KernelError(
        f"layer {layer!r}: kernel 'torch' has no weight-only int{args.num_bits} product on {device}; use 'vllm' or "
        "'reference'"
    )


def _int4_multiply(layer: str, weight: LowBitWeight) -> Multiply:
    """The operator takes groups only: a scale a row is repeated for the largest group that divides the columns."""
    assert weight.scale is not None
    sizes, columns = (32, 64, 128, 256), weight.shape[1]
    group = weight.scheme.group_size or next((size for size in reversed(sizes) if columns % size == 0), columns)
    if group not in sizes or weight.shape[0] % 16:
        raise KernelError(
            f"layer {layer!r}: torch's int4 product takes group sizes 32, 64, 128, 256 and output rows in multiples "
            f"of 16, not group {group} and {weight.shape[0]} rows; use kernel 'vllm' or 'reference'"
        )
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((weight.unpacked().to(torch.int32) + 8), 1)
    scale = weight.scale.t().expand(columns // group, -1) if weight.scale.shape[1] == 1 else weight.scale.t()
    # The operator computes (code - 8) · scale + zero.
    scales_and_zeros = torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales_and_zeros)


def _dynamic_int4_multiply(weight: LowBitWeight) -> Multiply:
    """Quantizes activations itself, as `quantize_activation` says. Scales of groups are kept in bfloat16."""
    (rows, columns), group, stored = weight.shape, weight.scheme.group_size, weight.scale
    assert stored is not None
    unsigned = (weight.codes + 8).view(torch.uint8)
    pairs = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    scale = stored.to(torch.bfloat16)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale, None, group, columns, rows)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._dyn_quant_matmul_4bit(x.to(torch.float32), packed, group, columns, rows)
        return y.to(x.dtype)

    return multiply


def _grouped_multiply(weight: LowBitWeight, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Multiply:
    """Σ over groups q of multiply(x̂_q, Ŵ_qᵀ) · activation scale · weight scale, in fp32; one group per channel.

    multiply: codes [N, G] and codes [G, O] → fp32 or int32 [N, O], exact or with fp32 sums.
    """
    codes = weight.unpacked()
    if not is_integer(weight.scheme.activations):  # pyright: ignore[reportArgumentType]
        codes = codes.to(torch.float8_e4m3fn)  # int4 codes are e4m3 values
    scale = weight.wide_scale()
    if weight.scheme.block:
        scale = scale.repeat_interleave(weight.scheme.block[0], dim=0)
    groups = scale.shape[1]
    parts = [part.contiguous().t() for part in codes.chunk(groups, dim=1)]
    row_sums = [part.to(torch.float32).sum(0) for part in parts]

    def product(x: torch.Tensor) -> torch.Tensor:
        low_bit = quantize_activation(x, weight.scheme)
        total = torch.zeros((), device=x.device)
        for q, codes_q in enumerate(low_bit.codes.chunk(groups, dim=1)):
            y = multiply(codes_q.contiguous(), parts[q])
            if low_bit.zero_point is not None:
                y = y - low_bit.zero_point * row_sums[q]
            total = total + y * _scale_of(low_bit, q) * scale[:, q]
        return total.to(x.dtype)

    return product


def _scale_of(activation: LowBitActivation, group: int) -> torch.Tensor:
    """fp32 [N, 1]: of a quantization group, or of the whole token."""
    column = min(group, activation.scale.shape[1] - 1)
    return activation.scale[:, column : column + 1]


def _int_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [N, G] · int8 [G, O] → int32 [N, O]. CUDA's operator wants more than 16 rows."""
    tokens = x.shape[0]
    if x.is_cuda and tokens <= 16:
        x = F.pad(x, (0, 0, 0, 17 - tokens))
    return torch.ops.aten._int_mm(x, w)[:tokens]


def _scaled_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """e4m3 [N, G] · e4m3 [G, O] → fp32 [N, O]."""
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return torch.ops.aten._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.float32)
