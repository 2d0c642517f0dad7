"""Unquantized bfloat16 products for CPUs, in which a row does not depend on those beside it.

vLLM 0.32 multiplies large weights by oneDNN and small ones by a kernel of its own. With AMX the first takes another
kernel for up to 36 rows than for more, large weights several, and the second another for up to four, so that a token
decoded alone is not rounded as one that is scored. Every product takes the same number of rows there. Without AMX and
AVX512-BF16 oneDNN has another kernel for one row alone, which has a second one here.
Remove this when vLLM's products are batch-invariant on CPUs.

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Callable

import torch
from torch import nn

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Input [N, I], weight (what vLLM left of it) and bias [O] → [N, O]."""

ROWS = 64


def multiply_alike(alike: Callable[[Product], Product]) -> None:
    """Have vLLM multiply by bfloat16 weights as `alike` has it, in layers built from now on; once a process.

    alike: `in_blocks` or `in_pairs`."""
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    if getattr(dispatch, "alike", False):
        return

    def dispatch_alike(layer: nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        dispatch(layer, remove_weight)
        if weight.ndim == 2 and weight.dtype == torch.bfloat16 and not weight.is_meta:
            layer.cpu_linear = alike(layer.cpu_linear)  # type: ignore[assignment]

    dispatch_alike.alike = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_alike


def in_blocks(product: Product) -> Product:
    """The product of inputs [..., I], `ROWS` rows at a time, the last of them padded by zeros."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.flatten(0, -2)
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        parts = [product(block, weight, bias) for block in padded.split(ROWS)]
        return torch.cat(parts)[: len(rows)].unflatten(0, x.shape[:-1])

    return multiply


def in_pairs(product: Product) -> Product:
    """The product of inputs [..., I], of one row alone beside one of zeros."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.numel() != x.shape[-1]:
            return product(x, weight, bias)
        pair = nn.functional.pad(x.flatten(0, -2), (0, 0, 0, 1))
        return product(pair, weight, bias)[:1].unflatten(0, x.shape[:-1])

    return multiply
