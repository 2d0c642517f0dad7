"""Gates, or activations alone, between an expert's two products.

Axes: N tokens, I expert columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from qarl.quant.checkpoint.families import SWIGLUOAI, SWIGLUOAI_LIMIT, SWIGLUOAI_SLOPE


def gate_of(activation: str, has_gate: bool = True) -> Callable[[Tensor], Tensor]:
    """Return the function of the first product [N, 2I] that is the input of the second, [N, I].

    Args:
        activation: transformers' name of an activation, whose rows of gate come before those of up,
            or `SWIGLUOAI`, where they alternate.
        has_gate: whether the first product has a gate. Without one it is [N, I].
    """
    if activation == SWIGLUOAI:
        return _swigluoai
    act = ACT2FN[activation]
    if not has_gate:
        return act

    def gated(merged: Tensor) -> Tensor:
        gate, up = merged.chunk(2, dim=-1)
        return act(gate) * up

    return gated


def _swigluoai(merged: Tensor) -> Tensor:
    """Return (up + 1) · gate · σ(slope · gate) of limited gate and up.

    Source: transformers' `GptOssExperts`, vLLM's `SwigluOAIAndMul`.
    """
    gate = merged[..., ::2].clamp(max=SWIGLUOAI_LIMIT)
    up = merged[..., 1::2].clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
    return (up + 1.0) * (gate * torch.sigmoid(gate * SWIGLUOAI_SLOPE))
