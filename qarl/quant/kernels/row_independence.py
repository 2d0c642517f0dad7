"""Does a kernel compute a row alike whatever stands beside it, and on any number of threads? Asked
of this machine.

A token is sampled in a batch that changes from step to step and scored in another. Their log-probs
have the same bits only if every kernel computes a row from that row alone. Kernels choose their
order of summation by the number of rows, of threads and of columns, so what holds at one shape, or
on one CPU, says little about another. Here a kernel is asked at the very shape, with inputs that
show it.

Axes: N rows, O output rows of a weight, I input columns.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

RowProduct = Callable[[torch.Tensor], torch.Tensor]
"""Inputs [N, I] → [N, O]."""

ROWS_ASKED = 64
"""Rows that are computed together, to compare others with."""
_FEWER = (1, 2, 3, 7, 33)
"""Numbers of rows that are computed apart from the rest: a sequence left alone, few, an odd
block.
"""
_ALONE = 8
"""So many rows are computed one by one."""
_CANCELLED = 16
"""Output rows for which the inputs are chosen."""


@dataclass(frozen=True)
class Dependence:
    """How a product depends on what is computed beside a row.

    when: what was computed otherwise ("1 row alone", "3 rows", "on 1 thread"). fraction: of the
    values that differ, of those whose inputs are chosen to show it. largest: difference, relative
    to the largest value.
    """

    when: str
    fraction: float
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.when}: {self.fraction:.1%} of the values differ, by up to {self.largest:.1e} of"
            " the largest"
        )


def cancelling_inputs(
    weight: torch.Tensor, dtype: torch.dtype, rows: int = ROWS_ASKED, seed: int = 0
) -> torch.Tensor:
    """Return inputs whose products with some rows of a weight nearly cancel, [rows, I] in `dtype`.

    weight: fp32 [n, I], few rows of it. Random inputs give sums that a 16-bit result rounds: the
    order of summation changes one value in some thousand. Where a sum cancels to a thousandth of
    its terms, the order shows in one of ten to thirty, so few rows tell.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(
        rows, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu"
    )
    basis, _ = torch.linalg.qr(weight.float().cpu().T)
    return (drawn - drawn @ basis @ basis.T).to(dtype)


def dependence(
    product: RowProduct, x: torch.Tensor, rows: slice | torch.Tensor = slice(_CANCELLED)
) -> Dependence | None:
    """Return how a product depends on the rows beside a row or on threads, None if it does not.

    x: compute dtype [N, I], at least `ROWS_ASKED` rows. rows: the output rows that are compared.
    All rows together, on all of torch's threads, are compared with some of them alone, few at a
    time, and on one thread.
    """
    together = product(x)[:, rows].clone()
    for count in _FEWER:
        for start in range(_ALONE if count == 1 else 1):
            part = product(x[start : start + count].contiguous())[:, rows]
            difference = _difference(
                "1 row alone" if count == 1 else f"{count} rows",
                part,
                together[start : start + count],
            )
            if difference is not None:
                return difference
    if x.device.type != "cpu" or torch.get_num_threads() == 1:
        return None
    return _difference("on 1 thread", on_threads(1, lambda: product(x)[:, rows]), together)


def _difference(when: str, values: torch.Tensor, expected: torch.Tensor) -> Dependence | None:
    differs = (values != expected) & ~(values.isnan() & expected.isnan())
    if not differs.any():
        return None
    largest = (values.float() - expected.float()).abs().max() / expected.float().abs().max()
    return Dependence(when, float(differs.float().mean()), float(largest))


def on_threads(count: int, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what `call` returns, computed on so many OpenMP threads, without gradient.

    It runs in a thread of its own, whose number of OpenMP threads is its own too: those of the
    caller, which vLLM binds to cores, stay as they are. vLLM also replaces `torch.set_num_threads`
    by a function that does nothing.
    """
    before = torch.get_num_threads()

    @torch.no_grad()
    def run() -> torch.Tensor:
        torch._C.set_num_threads(count)
        try:
            return call()
        finally:
            torch._C.set_num_threads(before)  # MKL's number is the process's

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
