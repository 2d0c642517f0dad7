"""Test on this machine of whether a kernel's rows depend on neighbouring rows or on threads.

A token is sampled in a batch that changes from step to step, and scored in another batch. The two
log-probs have the same bits only if every kernel computes a row from that row alone. Kernels choose
their order of summation by the number of rows, threads and columns, so a result at one shape, or on
one CPU, says little about another. The test therefore runs the kernel at the exact shape, with
inputs that make a dependence visible.

Axes: N rows, O output rows of a weight, I input columns.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

RowKernel = Callable[[torch.Tensor], torch.Tensor]
"""Function that multiplies inputs [N, I] by a weight → [N, O]."""

ROWS_TESTED = 64
"""Number of rows that are computed together, as the expected values."""
_FEWER = (1, 2, 3, 7, 33)
"""Numbers of rows that are computed separately: a single sequence, a few, an odd block."""
_ALONE = 8
"""Number of rows that are computed one by one."""
_CANCELLED = 16
"""Number of output rows for which the inputs are chosen."""


@dataclass(frozen=True)
class Dependence:
    """Dependence of a kernel's rows on neighbouring rows or on threads."""

    when: str
    """The condition that changed the values: "1 row alone", "3 rows", "on 1 thread"."""
    fraction: float
    """Fraction of values that differ, among those whose inputs are chosen to show a dependence."""
    largest: float
    """Largest difference, relative to the largest value."""

    def __str__(self) -> str:
        return (
            f"{self.when}: {self.fraction:.1%} of the values differ, by up to {self.largest:.1e} of"
            " the largest"
        )


def cancelling_inputs(
    weight: torch.Tensor, dtype: torch.dtype, rows: int = ROWS_TESTED, seed: int = 0
) -> torch.Tensor:
    """Return inputs whose products with some rows of a weight nearly cancel, [rows, I] in `dtype`.

    weight: a few rows of a weight, fp32 [n, I].

    Random inputs give sums that are rounded to a 16-bit result, so that the order of summation
    changes about one value in a thousand. If a sum cancels to a thousandth of its terms, the order
    changes one value in ten to thirty, and few rows are enough to see it.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(
        rows, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu"
    )
    # Remove the inputs' part in the span of the weight's rows; rounding to `dtype` leaves a rest.
    basis, _ = torch.linalg.qr(weight.float().cpu().T)
    return (drawn - drawn @ basis @ basis.T).to(dtype)


def find_dependence(
    kernel: RowKernel, x: torch.Tensor, rows: slice | torch.Tensor = slice(_CANCELLED)
) -> Dependence | None:
    """Return how a kernel's rows depend on neighbouring rows or on threads; None if they do not.

    All rows together, on all of torch's threads, are compared with some rows alone, with a few at a
    time, and with all on one thread.

    Args:
        kernel: the kernel to test.
        x: inputs, compute dtype [N, I], at least `ROWS_TESTED` rows.
        rows: output rows of the weight that are compared.
    """
    together = kernel(x)[:, rows].clone()
    for count in _FEWER:
        when = "1 row alone" if count == 1 else f"{count} rows"
        for start in range(_ALONE if count == 1 else 1):
            part = kernel(x[start : start + count].contiguous())[:, rows]
            difference = _difference(when, part, together[start : start + count])
            if difference is not None:
                return difference
    if x.device.type != "cpu" or torch.get_num_threads() == 1:
        return None
    return _difference("on 1 thread", on_threads(1, lambda: kernel(x)[:, rows]), together)


def _difference(when: str, values: torch.Tensor, expected: torch.Tensor) -> Dependence | None:
    """Return how values differ from the expected ones; None if they are equal."""
    differs = (values != expected) & ~(values.isnan() & expected.isnan())
    if not differs.any():
        return None
    difference = (values.float() - expected.float()).abs().max()
    largest = difference / expected.float().abs().max()
    return Dependence(when, float(differs.float().mean()), float(largest))


def on_threads(count: int, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what `call` returns, computed on `count` OpenMP threads, without gradient.

    `call` runs in a new Python thread, which has its own number of OpenMP threads. The caller's,
    which vLLM binds to cores, do not change. The number is set through torch's private function,
    because vLLM replaces `torch.set_num_threads` by one that does nothing.
    """
    before = torch.get_num_threads()

    @torch.no_grad()
    def run() -> torch.Tensor:
        torch._C.set_num_threads(count)
        try:
            return call()
        finally:
            torch._C.set_num_threads(before)  # MKL's number of threads belongs to the process.

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
