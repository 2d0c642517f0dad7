"""`qarl bench kernels`: the learner's low-bit products against its bf16 product, by scheme, layer shape and tokens.

Every round times both, one after the other, so that a ratio compares like with like; medians of the rounds are shown.
Axes: N tokens, O output rows, I input columns.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qarl.quant.kernels import KernelError, make_factory
from qarl.quant.kernels.base import KernelFactory, LowBitMatmul
from qarl.quant.kernels.supported import why_not
from qarl.quant.materialize import materialize
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, Scheme, SchemeError, get_scheme
from qarl.report.tables import PlainTable

_LONGEST_ROUND_SECONDS = 2.0
"""A product slower than this is timed once."""


@dataclass(frozen=True)
class KernelRow:
    """One product. shape: (O, I). seconds: median; ratio: to the bf16 product's, below 1 is faster; both None where
    it cannot run, for `reason`. kernel: what multiplied."""

    scheme: str
    shape: tuple[int, int]
    tokens: int
    kernel: str
    seconds: float | None
    ratio: float | None
    reason: str


def measure(
    schemes: Sequence[str], shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: str, family: str,
    repeats: int,
) -> list[KernelRow]:  # fmt: skip
    """Rows by shape, then scheme, then tokens; schemes empty: all. Raises `ConfigError` for unusable values."""
    found = [get_scheme(name) for name in schemes or SCHEMES if name != "bf16"]
    compute = COMPUTE_DTYPES[dtype]
    factory = make_factory(family, compute)
    reasons = {scheme.name: why_not(scheme.name, compute, family) for scheme in found}
    rows = []
    for shape in shapes:
        master = _normal(shape).mul_(0.02)
        plain = _product(master, get_scheme("bf16"), compute, factory)
        for scheme in found:
            reason = reasons[scheme.name]
            try:
                product = None if reason else _product(master, scheme, compute, factory)
            except (SchemeError, KernelError) as error:
                product, reason = None, str(error)
            if product is None:
                rows.append(
                    KernelRow(
                        scheme=scheme.name, shape=shape, tokens=0, kernel="-", seconds=None, ratio=None, reason=reason
                    )
                )
            else:
                rows += [_row(scheme, shape, n, product, plain, compute, repeats) for n in tokens]
    return rows


def table(rows: list[KernelRow], dtype: str) -> PlainTable:
    """Rows for a person: a column for each count of tokens, time as a multiple of bf16's, and milliseconds."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    counts = sorted({row.tokens for row in rows if row.seconds is not None})
    title = f"the learner's products, {dtype}, {device}: time / bf16's (ms)"
    figures = [f"{count} tokens" for count in counts]
    reasons = dict.fromkeys(f"- {row.scheme}: {row.reason}" for row in rows if row.reason)
    shown = PlainTable(
        "scheme", "rows × columns", *figures, "kernel", figures=figures, title=title, caption="\n".join(reasons)
    )
    for scheme, shape in dict.fromkeys((row.scheme, row.shape) for row in rows):
        found = {row.tokens: row for row in rows if (row.scheme, row.shape) == (scheme, shape)}
        times = [_times(found[count]) if count in found else "-" for count in counts]
        shown.add_row(scheme, f"{shape[0]} × {shape[1]}", *times, next(iter(found.values())).kernel)
    return shown


def _times(row: KernelRow) -> str:
    assert row.ratio is not None
    assert row.seconds is not None
    return f"{row.ratio:.2f} ({row.seconds * 1e3:.2f})"


def rows_as_data(rows: list[KernelRow]) -> list[dict]:
    """Rows as JSON-ready dictionaries."""
    return [dataclasses.asdict(row) for row in rows]


def _product(master: torch.Tensor, scheme: Scheme, dtype: torch.dtype, factory: KernelFactory) -> LowBitMatmul:
    return factory("a layer", materialize(master, scheme, dtype), None)


def _row(
    scheme: Scheme, shape: tuple[int, int], tokens: int, product: LowBitMatmul, plain: LowBitMatmul, dtype: torch.dtype,
    repeats: int,
) -> KernelRow:  # fmt: skip
    x = _normal((tokens, shape[1])).to(dtype)
    with torch.no_grad():
        first = _seconds(lambda: product(x))  # warms up
        plain(x)
        rounds = 1 if first > _LONGEST_ROUND_SECONDS else repeats
        pairs = [(_seconds(lambda: product(x)), _seconds(lambda: plain(x))) for _ in range(rounds)]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return KernelRow(
        scheme=scheme.name,
        shape=shape,
        tokens=tokens,
        kernel=product.name,
        seconds=statistics.median(p[0] for p in pairs),
        ratio=ratio,
        reason="",
    )


def _seconds(work: Callable[[], object]) -> float:
    """Of one call; on CUDA between two events on the device."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _normal(shape: tuple[int, int]) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return values.cuda() if torch.cuda.is_available() else values
