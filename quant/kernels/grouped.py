"""Routed experts as torch's grouped products: one call multiplies every expert's tokens with its own matrix.

Unquantized bfloat16 goes through `grouped_mm`; fp8 (a scale a row) through `_scaled_grouped_mm` on GPUs of compute
capability 9.0. Other schemes have no grouped operator in torch and go expert after expert (`per_expert`).

Axes: N tokens, K experts a token, M = N·K rows, E experts, H hidden columns, I expert columns.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.materialize.experts import LowBitExperts

GroupedMultiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows sorted by expert [M, in], ends of the experts' runs int32 [E]) → [M, out]."""


class GroupedExperts:
    """As `ExpertsLoop`, all experts at once."""

    def __init__(self, name: str, gate_up: GroupedMultiply, down: GroupedMultiply, shape: ExpertsShape):
        self.name = name
        self._gate_up = gate_up
        self._down = down
        self._experts = shape.experts
        self._activation: nn.Module = ACT2FN[shape.activation]

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `ExpertsMatmul`."""
        flat = index.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self._experts).cumsum(0).to(torch.int32)
        rows = order // index.shape[1]
        gate, up = self._gate_up(x[rows], ends).chunk(2, dim=-1)
        output = self._down(self._activation(gate) * up, ends).to(torch.float32)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return total.index_add_(0, rows, output * weights.flatten()[order, None]).to(x.dtype)


def grouped_experts(shape: ExpertsShape, weights: LowBitExperts) -> GroupedExperts | None:
    """The grouped operator for these experts; None where torch has none."""
    if weights.stacks is None:
        return None
    products = [_multiply(stack, shape.experts) for stack in weights.stacks]
    if products[0] is None or products[1] is None:
        return None
    (name, gate_up), (_, down) = products[0], products[1]
    return GroupedExperts(name, gate_up, down, shape)


def _multiply(stack: LowBitWeight, experts: int) -> tuple[str, GroupedMultiply] | None:
    """stack: every expert's matrix, one below the other."""
    codes = stack.codes.view(experts, -1, stack.shape[1]).transpose(1, 2)
    if stack.scale is None:
        return ("grouped_mm", _grouped_mm(codes)) if codes.dtype == torch.bfloat16 else None
    in_fp32 = stack.scale.dtype == torch.float32  # of a float32 learner: the operator returns bfloat16 alone
    if stack.scheme.name == "fp8" and not in_fp32 and _has_scaled_grouped_mm(codes.device):
        return "_scaled_grouped_mm", _scaled_grouped_mm(stack, codes, experts)
    return None


def _grouped_mm(codes: torch.Tensor) -> GroupedMultiply:
    return lambda x, ends: nn.functional.grouped_mm(x.contiguous(), codes, offs=ends)


def _scaled_grouped_mm(stack: LowBitWeight, codes: torch.Tensor, experts: int) -> GroupedMultiply:
    assert stack.scale is not None
    scale = stack.scale.to(torch.float32).view(experts, -1)

    def multiply(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        low_bit = quantize_activation(x, stack.scheme)
        return torch.ops.aten._scaled_grouped_mm(
            low_bit.codes, codes, low_bit.scale.flatten(), scale, offs=ends, out_dtype=torch.bfloat16
        ).to(x.dtype)

    return multiply


def _has_scaled_grouped_mm(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
