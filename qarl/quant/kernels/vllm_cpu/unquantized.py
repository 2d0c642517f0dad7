"""Unquantized products for CPUs in which a row does not depend on the rows beside it.

vLLM 0.32 multiplies large weights by oneDNN and small ones by its own kernel.

- oneDNN sums a single row in another order than the same row among others: in bfloat16 and float32
  from 1,025 input columns on, and in bfloat16 at every width on CPUs without AVX512-BF16. Therefore
  a single row is multiplied together with a row of zeros, on every CPU and in every dtype, which
  takes 15 to 50 % longer.
- With AMX, oneDNN uses another kernel for up to 36 bfloat16 rows than for more, and several for
  large weights. vLLM's own kernel differs for up to four rows. Therefore, with AMX, every bfloat16
  product has the same number of rows.

Remove this when vLLM's products are batch-invariant on CPUs.

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qarl.quant.kernels.row_independence import cancelling_inputs, find_dependence

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Product of an input [N, I], the weight as vLLM left it and a bias [O] → [N, O]."""

ROWS = 64
"""Number of rows of a block."""


def make_rows_independent(amx: bool) -> None:
    """Make rows of vLLM's unquantized products independent of the rows beside them.

    This applies to layers that are built afterwards. A second call in a process does nothing.

    amx: whether the CPU has AMX. With it, bfloat16 products are cut into blocks. Other products are
    tested, once per shape and dtype, for whether pairs are enough on this machine
    (`quant.kernels.row_independence`), and are cut into blocks if not.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    if getattr(dispatch, "alike", False):
        return
    forms: dict[tuple[torch.Size, torch.dtype], Callable[[Product], Product]] = {}

    def dispatch_alike(layer: nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        # asked first: with AVX512-BF16 vLLM packs the weight of a convolution into a matrix
        is_product = weight.ndim == 2 and not weight.is_meta
        dispatch(layer, remove_weight)
        if not is_product:
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
    """Return whether `in_pairs` is enough to make rows independent of the rows beside them.

    weight: the weight that the product multiplies by, [O, I]. Takes as long as about 100 rows.
    """
    few = weight[:16].float()
    x = cancelling_inputs(few, weight.dtype)
    paired = in_pairs(product)
    return find_dependence(lambda rows: paired(rows, weight, None), x, slice(len(few))) is None


def in_blocks(product: Product) -> Product:
    """Return a product of inputs [..., I] that takes `ROWS` rows at a time, padded with zeros."""

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        parts = [product(block, weight, bias) for block in padded.split(ROWS)]
        return torch.cat(parts)[: len(rows)].unflatten(0, x.shape[:-1])

    return multiply


def in_pairs(product: Product) -> Product:
    """Return a product of inputs [..., I] that multiplies a single row beside a row of zeros."""

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if x.numel() != x.shape[-1]:
            return product(x, weight, bias)
        pair = nn.functional.pad(x.flatten(0, -2), (0, 0, 0, 1))
        return product(pair, weight, bias)[:1].unflatten(0, x.shape[:-1])

    return multiply
