"""Int4 weights on CPUs: repacked for vLLM's kernel without widening them, and multiplied in fp32
where it has none.

vLLM 0.32 turns codes packed along the input into codes packed along the output by way of an int32
for each: four bytes a weight, and most of a publish's time. Here nibbles are transposed within
their words; the result is the same bytes. Remove this when vLLM's `_process_gptq_weights_w4a16`
does so.

vLLM's kernel is compiled for AVX-512 alone. Elsewhere the values that codes stand for are held in
fp32, four bytes a weight, and multiplied in fp32.

Axes: N tokens, O output rows, I input columns, G groups of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.cpu import _get_isa_hint
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearLayerConfig,
)

from qarl.quant.kernels.vllm_cpu.fp8 import fp32_product

_NIBBLES = 8
"""Of an int32 word."""
_BUTTERFLY = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))
"""Rows apart, and the nibbles of the upper word that stay, in each pass of the transposition."""
_BLOCK = 1 << 18
"""Words that are transposed at once, a MiB: few enough for a core's cache, and enough that torch's
calls, 60 a block, are not what takes the time.
"""


class CPUWNA16NibbleKernel(CPUWNA16LinearKernel):
    """vLLM's kernel over the same bytes, packed otherwise."""

    def _process_gptq_weights_w4a16(self, layer: Any) -> None:
        packed = getattr(layer, self.w_q_name)
        layer.isa_hint = _get_isa_hint(getattr(layer, self.w_s_name).dtype)
        packed.data = repacked(packed.data.t())


class CPUWNA16Fp32LinearKernel(CPUWNA16LinearKernel):
    """vLLM's kernel with its product in fp32."""

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """vLLM's hook: whether it multiplies such a layer, and else why not."""
        if c.zero_points:
            return (
                False,
                "zero points need vLLM's kernel, which is for CPUs with AVX-512",
            )
        return super().can_implement(c)

    def _process_gptq_weights_w4a16(self, layer: Any) -> None:
        packed, scale = (getattr(layer, name).data.t() for name in (self.w_q_name, self.w_s_name))
        setattr(
            layer,
            self.w_q_name,
            nn.Parameter(unpacked(packed, scale), requires_grad=False),
        )

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """vLLM's hook. x: compute dtype [..., I] → compute dtype [..., O]."""
        output = fp32_product(x.flatten(0, -2).float(), getattr(layer, self.w_q_name))
        output = output if bias is None else output + bias
        return output.to(x.dtype).unflatten(0, x.shape[:-1])


def unpacked(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """words: int32 [O, I/8] as of `repacked`, code 0 for -8; scale: floating [O, G] → their values,
    fp32 [O, I].
    """
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)).bitwise_and_(15)
    groups = nibbles.view(*scale.shape, -1).float().sub_(8)
    return groups.mul_(scale.float().unsqueeze(-1)).view(len(words), -1)


def repacked(words: torch.Tensor) -> torch.Tensor:
    """words: int32 [O, I/8], eight codes of a row in each, the first in the lowest nibble; O in 16s
    → int32 [O/16, 2 I]: for each block of 16 rows and each column two words, of the codes of eight
    rows each.
    """
    rows, length = words.shape
    output = torch.empty(rows // 16, length * _NIBBLES * 2, dtype=torch.int32)
    sixteens = max(1, _BLOCK // (16 * length))
    parts = zip(words.split(16 * sixteens), output.split(sixteens), strict=True)
    for part, into in parts:
        columns = _transposed(part.reshape(-1, _NIBBLES, length).unbind(1))
        stacked = torch.stack(columns, dim=-1).view(-1, 2, length * _NIBBLES)
        into.view(-1, length * _NIBBLES, 2).copy_(stacked.transpose(1, 2))
    return output


def _transposed(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """rows: eight tensors of words; word i of tensor r gets nibble r of word i of every tensor, in
    order: nibble c of tensor r and nibble r of tensor c change places.
    """
    words = [row.clone() for row in rows]
    moved = torch.empty_like(words[0])
    for apart, mask in _BUTTERFLY:
        for low in (r for r in range(_NIBBLES) if not r & apart):
            upper, lower = words[low], words[low + apart]
            torch.bitwise_right_shift(upper, 4 * apart, out=moved).bitwise_xor_(lower).bitwise_and_(
                mask
            )
            lower.bitwise_xor_(moved)
            upper.bitwise_xor_(moved.bitwise_left_shift_(4 * apart))
    return words
