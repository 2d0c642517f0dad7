"""Unquantized products for CPUs, in which a row does not depend on those beside it.

vLLM 0.32 multiplies large weights by oneDNN and small ones by a kernel of its own. oneDNN adds up
one row alone in another order than the same row among others: in bfloat16 and float32 from 1,025
input columns up, and in bfloat16 at every width on CPUs without AVX512-BF16. So one row alone is
multiplied beside one of zeros, on every CPU and in every dtype, which takes it 15 to 50 % longer.
With AMX oneDNN takes another kernel for up to 36 bfloat16 rows than for more, large weights
several, and vLLM's own kernel another for up to four: every bfloat16 product takes the same number
of rows there. Remove this when vLLM's products are batch-invariant on CPUs.

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qarl.quant.kernels.row_independence import cancelling_inputs, dependence

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Input [N, I], weight (what vLLM left of it) and bias [O] → [N, O]."""

ROWS = 64


def multiply_alike(amx: bool) -> None:
    """Have vLLM multiply by unquantized weights row by row alike, in layers built from now on; once
    a process.

    amx: whether the CPU has AMX, where bfloat16 products are cut into blocks. Others are asked,
    once for each shape and dtype, whether pairs are enough on this machine
    (`quant.kernels.row_independence`), and cut into blocks if not.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    if getattr(dispatch, "alike", False):
        return
    forms: dict[tuple[torch.Size, torch.dtype], Callable[[Product], Product]] = {}

    def dispatch_alike(layer: nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        dispatch(layer, remove_weight)
        if weight.ndim != 2 or weight.is_meta:
            return
        product: Product = layer.cpu_linear  # type: ignore[assignment]
        kind = (weight.shape, weight.dtype)
        if kind not in forms:
            always = amx and weight.dtype == torch.bfloat16
            forms[kind] = in_blocks if always or not pairs_suffice(product, weight) else in_pairs
        layer.cpu_linear = forms[kind](product)  # type: ignore[assignment]

    dispatch_alike.alike = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_alike


@torch.no_grad()
def pairs_suffice(product: Product, weight: torch.Tensor) -> bool:
    """Return whether a row is multiplied alike beside any others, once it is never multiplied
    alone.

    weight: [O, I], what the product multiplies by. Takes as long as some 100 rows.
    """
    few = weight[:16].float()
    x = cancelling_inputs(few, weight.dtype)
    paired = in_pairs(product)
    return dependence(lambda rows: paired(rows, weight, None), x, slice(len(few))) is None


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
