"""Int4 weights on CPUs: fast repacking for vLLM's kernel, and fp32 products on CPUs without it.

vLLM 0.32 repacks codes from along the input to along the output by widening each to an int32. That
takes four bytes per weight and most of a publish's time. Here nibbles are transposed within their
words, with the same bytes as the result. Remove this when vLLM's `_process_gptq_weights_w4a16` does
so.

vLLM's kernel is compiled for AVX-512 only. On other CPUs the values of the codes are held in fp32,
four bytes per weight, and multiplied in fp32.

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
"""Nibbles of an int32 word."""
_BUTTERFLY = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))
"""Passes of the transposition: distance of the two rows that exchange nibbles, and mask of the
nibbles that the upper row keeps.
"""
_BLOCK = 1 << 18
"""Words that are transposed together, 1 MiB.

They are few enough for a core's cache, and so many that torch's 60 calls per block take little of
the time.
"""


class CPUWNA16NibbleKernel(CPUWNA16LinearKernel):
    """vLLM's kernel with faster repacking of its weight."""

    def _process_gptq_weights_w4a16(self, layer: Any) -> None:
        """Repack the loaded weight for the kernel (vLLM's hook)."""
        packed = getattr(layer, self.w_q_name)
        layer.isa_hint = _get_isa_hint(getattr(layer, self.w_s_name).dtype)
        packed.data = repacked(packed.data.t())


class CPUWNA16Fp32LinearKernel(CPUWNA16LinearKernel):
    """vLLM's kernel with its product in fp32, for CPUs without AVX-512."""

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether the kernel supports such a layer, and the reason if not (vLLM's hook)."""
        if c.zero_points:
            reason = "zero points need vLLM's kernel, which is for CPUs with AVX-512"
            return False, reason
        return super().can_implement(c)

    def _process_gptq_weights_w4a16(self, layer: Any) -> None:
        """Convert the loaded weight to fp32 (vLLM's hook)."""
        packed = getattr(layer, self.w_q_name).data.t()
        scale = getattr(layer, self.w_s_name).data.t()
        values = nn.Parameter(unpacked(packed, scale), requires_grad=False)
        setattr(layer, self.w_q_name, values)

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply x, compute dtype [..., I]; returns compute dtype [..., O] (vLLM's hook)."""
        output = fp32_product(x.flatten(0, -2).float(), getattr(layer, self.w_q_name))
        output = output if bias is None else output + bias
        return output.to(x.dtype).unflatten(0, x.shape[:-1])


def unpacked(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes, fp32 [O, I].

    words: int32 [O, I/8], packed as in `repacked`'s argument; code 0 is -8. scale: floating [O, G].
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (words.unsqueeze(-1) >> shifts).bitwise_and_(15)
    groups = nibbles.view(*scale.shape, -1).float().sub_(8)
    return groups.mul_(scale.float().unsqueeze(-1)).view(len(words), -1)


def repacked(words: torch.Tensor) -> torch.Tensor:
    """Repack codes from along the input to along the output.

    words: int32 [O, I/8], with eight codes of a row in each word, the first in the lowest nibble. O
    must be a multiple of 16.

    Returns int32 [O/16, 2 I]. For each block of 16 rows and each column it has two words, each with
    the codes of eight rows.
    """
    rows, length = words.shape
    output = torch.empty(rows // 16, length * _NIBBLES * 2, dtype=torch.int32)
    sixteens = max(1, _BLOCK // (16 * length))
    parts = zip(words.split(16 * sixteens), output.split(sixteens), strict=True)
    for part, target in parts:
        columns = _transposed(part.reshape(-1, _NIBBLES, length).unbind(1))
        stacked = torch.stack(columns, dim=-1).view(-1, 2, length * _NIBBLES)
        target.view(-1, length * _NIBBLES, 2).copy_(stacked.transpose(1, 2))
    return output


def _transposed(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Transpose the nibbles of eight tensors of words.

    For each i, the eight words number i are an 8 × 8 matrix of nibbles: nibble c of tensor r and
    nibble r of tensor c change places.
    """
    words = [row.clone() for row in rows]
    difference = torch.empty_like(words[0])
    # Transpose 2 × 2 blocks of blocks: in each pass, a row's high nibbles and the low nibbles of
    # the row `distance` below it are exchanged by XORs, without further buffers.
    for distance, mask in _BUTTERFLY:
        shift = 4 * distance
        for row in range(_NIBBLES):
            if row & distance:
                continue
            upper = words[row]
            lower = words[row + distance]
            torch.bitwise_right_shift(upper, shift, out=difference)
            difference.bitwise_xor_(lower).bitwise_and_(mask)
            lower.bitwise_xor_(difference)
            upper.bitwise_xor_(difference.bitwise_left_shift_(shift))
    return words
