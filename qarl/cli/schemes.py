"""`qarl schemes`: every scheme, what it costs in bytes, and what would multiply it on this machine."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qarl.cli.scheme_row import REFERENCE_SHAPE, SchemeRow
from qarl.report.startup import phase
from quant.runtime.answers import keep_answer, read_answer


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


def print_schemes(console: Console, rows: list[SchemeRow], model: str | None) -> None:
    """The table, and below it the reasons of what it leaves open."""
    of = f"the layers of {model}" if model else "a layer of {}×{}".format(*REFERENCE_SHAPE)
    table = Table(title=f"bytes per parameter: {of}, scales included")
    table.add_column("scheme", no_wrap=True)
    table.add_column("weights")
    table.add_column("activations")
    table.add_column("bytes/param", justify="right", no_wrap=True)
    if model:
        table.add_column("checkpoint", justify="right", no_wrap=True)
    same = all(row.learner_kernel == row.engine_kernel for row in rows)
    for user in ("learner and engine",) if same else ("learner", "engine"):
        table.add_column(user, overflow="fold")
    for row in rows:
        per = "–" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.4f}"
        size = ["–" if row.checkpoint_bytes is None else _size(row.checkpoint_bytes)] if model else []
        kernels = [row.engine_kernel or "–"] if same else [row.learner_kernel or "–", row.engine_kernel or "–"]
        table.add_row(row.name, row.weights, row.activations, per, *size, *kernels)
    console.print(table)
    for reason, names in _reasons(rows).items():
        console.print(f"{', '.join(names)}: {reason}", markup=False, highlight=False, soft_wrap=True)


def _reasons(rows: list[SchemeRow]) -> dict[str, list[str]]:
    """What keeps a scheme from running here → names of the schemes it keeps."""
    found: dict[str, list[str]] = {}
    for row in rows:
        reasons = [row.shape_reason]
        if row.learner_reason == row.engine_reason:
            reasons.append(row.engine_reason and f"neither learner nor engine here: {row.engine_reason}")
        else:
            reasons.append(row.learner_reason and f"not in the learner here: {row.learner_reason}")
            reasons.append(row.engine_reason and f"not in the engine here: {row.engine_reason}")
        for reason in filter(None, reasons):
            found.setdefault(reason, []).append(row.name)
    return found


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def rows_as_data(rows: list[SchemeRow]) -> list[dict[str, Any]]:
    """The rows as plain data for JSON."""
    return [dataclasses.asdict(row) for row in rows]
