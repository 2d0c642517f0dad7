"""`qarl schemes`: every scheme, what it costs in bytes, and what would multiply it on this machine."""

import dataclasses
import hashlib
import re
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.scheme_row import REFERENCE_SHAPE, SchemeRow
from qarl.quant.runtime.answers import keep_answer, read_answer
from qarl.report.startup import phase
from qarl.report.tables import PlainTable


def scheme_rows(model: str | None, dtype: str, kernel: str = "auto") -> list[SchemeRow]:
    """A row per scheme; remembered on disk, so that only the first time imports vLLM and asks its kernels.

    model: folder, hub id or embedded name, of which only config.json is read; None: a layer of `REFERENCE_SHAPE`.
    dtype: compute dtype, a key of COMPUTE_DTYPES. kernel: the learner's kernel family.
    Raises `ModelError` for a model whose configuration cannot be read.
    """
    question = {"model": model, "config": _config_digest(model), "dtype": dtype, "kernel": kernel}
    kept = read_answer("schemes", question)
    if kept:
        return [SchemeRow(**row) for row in kept]
    from qarl.cli.scheme_rows import compute_rows

    with phase("asking the kernels of this machine"):
        rows = compute_rows(model, dtype, kernel)
    keep_answer("schemes", question, rows_as_data(rows))
    return rows


def _config_digest(model: str | None) -> str:
    """SHA-256 of a local model's config.json; "" without one (an embedded model's is our code, a hub id's its name)."""
    file = Path(model or ".").expanduser() / "config.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if model and file.is_file() else ""


def print_schemes(console: Console, rows: list[SchemeRow], model: str | None, verbose: bool = False) -> None:
    """The table: what a scheme stores and in how many bytes, whether learner and engine run it here, and in short why
    not. verbose: the kernels and, below, the reasons in full."""
    shapes = f"the layers of {model}" if model else "a layer of {}×{}".format(*REFERENCE_SHAPE)
    size = ("checkpoint",) if model else ()
    users = ("learner's kernel", "engine's kernel") if verbose else ("learner", "engine")
    last = () if verbose else ("why not",)
    table = PlainTable(
        "scheme", "weights", "activations", "bytes/param", *size, *users, *last, figures=("bytes/param", "checkpoint"),
        title=f"bytes per parameter: {shapes}, scales included", caption="" if verbose else _HINT,
    )  # fmt: skip
    for row in rows:
        per = "-" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.4f}"
        total = ["-" if row.checkpoint_bytes is None else _size(row.checkpoint_bytes)] if model else []
        kernels = (row.learner_kernel, row.engine_kernel)
        runs = [kernel or "-" for kernel in kernels] if verbose else ["yes" if kernel else "no" for kernel in kernels]
        why_not = [] if verbose else [short_reason(row)]
        table.add_row(row.name, row.weights, row.activations, per, *total, *runs, *why_not)
    table.show(console)
    if verbose:
        for reason, names in _reasons(rows).items():
            console.print(f"{', '.join(names)}: {reason}", markup=False, highlight=False, soft_wrap=True)


_HINT = "learner, engine: whether it runs on this machine; kernels and reasons in full with -v"

_SHORT = 60
"""Characters of a reason that the table shows."""


def short_reason(row: SchemeRow) -> str:
    """Why a scheme cannot run here, in a few words; "" where it can. What is known beyond vLLM's own words stands after
    them in brackets ("vLLM has it for …") and is the shorter."""
    reason = row.shape_reason or row.engine_reason or row.learner_reason
    known = re.search(r"\((vLLM has [^()]*)\)$", reason)
    words = known[1] if known else re.split(r"[;:.] ", reason)[0]
    return textwrap.shorten(words, _SHORT, placeholder=" …")


def _reasons(rows: list[SchemeRow]) -> dict[str, list[str]]:
    """What keeps a scheme from running here → names of the schemes it keeps."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        reasons = [row.shape_reason]
        if row.learner_reason == row.engine_reason:
            reasons.append(row.engine_reason and f"neither learner nor engine here: {row.engine_reason}")
        else:
            reasons.append(row.learner_reason and f"not in the learner here: {row.learner_reason}")
            reasons.append(row.engine_reason and f"not in the engine here: {row.engine_reason}")
        for reason in filter(None, reasons):
            by_reason.setdefault(reason, []).append(row.name)
    return by_reason


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def rows_as_data(rows: list[SchemeRow]) -> list[dict[str, Any]]:
    """The rows as plain data for JSON."""
    return [dataclasses.asdict(row) for row in rows]
