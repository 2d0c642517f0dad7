"""Int4 weights repacked for the CPU's kernel without widening them, so that publishing does not wait for it.

vLLM 0.32 turns codes packed along the input into codes packed along the output by way of an int32 for each: four bytes
a weight, and most of a publish's time. Here nibbles are transposed within their words; the result is the same bytes.
Remove this when vLLM's `_process_gptq_weights_w4a16` does so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.cpu import _get_isa_hint

_NIBBLES = 8
"""Of an int32 word."""
_BUTTERFLY = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))
"""Rows apart, and the nibbles of the upper word that stay, in each pass of the transposition."""
_BLOCK = 1 << 18
"""Words that are transposed at once, a MiB: few enough for a core's cache, and enough that torch's calls, 60 a block,
are not what takes the time."""


class CPUWNA16NibbleKernel(CPUWNA16LinearKernel):
    """vLLM's kernel over the same bytes, packed otherwise."""

    def _process_gptq_weights_w4a16(self, layer: Any) -> None:
        packed = getattr(layer, self.w_q_name)
        layer.isa_hint = _get_isa_hint(getattr(layer, self.w_s_name).dtype)
        packed.data = repacked(packed.data.t())


def repacked(words: torch.Tensor) -> torch.Tensor:
    """words: int32 [O, I/8], eight codes of a row in each, the first in the lowest nibble; O in 16s → int32
    [O/16, 2 I]: for each block of 16 rows and each column two words, of the codes of eight rows each."""
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
    """rows: eight tensors of words; word i of tensor r gets nibble r of word i of every tensor, in order: nibble c of
    tensor r and nibble r of tensor c change places."""
    words = [row.clone() for row in rows]
    moved = torch.empty_like(words[0])
    for apart, mask in _BUTTERFLY:
        for low in (r for r in range(_NIBBLES) if not r & apart):
            upper, lower = words[low], words[low + apart]
            torch.bitwise_right_shift(upper, 4 * apart, out=moved).bitwise_xor_(lower).bitwise_and_(mask)
            lower.bitwise_xor_(moved)
            upper.bitwise_xor_(moved.bitwise_left_shift_(4 * apart))
    return words
