"""`python -m benchmarks delivery`: weight versions sent to a running vLLM server.

Versions are sent whole and as deltas, and compared with bf16 from disk. Each scheme runs in its
own process with a random model and a server on its export; versions are published to it as in a
run. The columns of seconds are:

- write: write the files of a version, or of its difference from the previous one.
- send: transfer them to the server, with `--transfer http`.
- stage: the server reads, hashes and applies them; it can sample meanwhile.
- pause: the server loads them; it samples nothing.

bf16 is measured in the same rounds: the checkpoint is saved, and vLLM reloads it from disk in that
process, which is the usual way without QaRL.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qarl.bench.process import run_worker
from qarl.configs.errors import ConfigError
from qarl.quant.schemes import get_scheme
from qarl.report.tables import PlainTable


def measure(
    shape: str,
    schemes: Sequence[str],
    lr: float,
    rounds: int,
    folder: str | None,
    transfer: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the figures of every scheme.

    folder: where versions are written; None selects memory if /dev/shm exists, otherwise temporary
    files. transfer: how versions reach the server. Invalid values raise before anything is
    measured.
    """
    if not lr > 0:
        raise ConfigError(f"--lr {lr:g} must be above 0")
    for scheme in schemes:
        get_scheme(scheme)
    where = folder or next(
        (place for place in ("/dev/shm", "/tmp") if os.access(place, os.W_OK)), "."
    )
    if not Path(where).is_dir():
        raise ConfigError(f"--folder {where!r} is not a folder; give one that exists")
    rows = []
    for scheme in dict.fromkeys(schemes):
        say(f"{scheme} …")
        job = {
            "scheme": scheme,
            "shape": shape,
            "lr": lr,
            "rounds": rounds,
            "folder": where,
            "transfer": transfer,
        }
        rows.append(
            run_worker(
                "benchmarks.delivery_worker",
                json.dumps(job),
                dict,
                f"the engine in {scheme}",
            )
        )
    settings = {"shape": shape, "lr": lr, "rounds": rounds, "transfer": transfer}
    return {**settings, "in_memory": where.startswith("/dev/shm"), "rows": rows}


@dataclasses.dataclass(frozen=True)
class Ratios:
    """Ratios computed from the figures of one scheme."""

    full_bytes: float
    """Bytes of a whole version over those of the bf16 checkpoint."""
    quantized_bytes: float
    """`full_bytes` without embedding and output head."""
    full_seconds: float
    """Seconds of a whole version over those of bf16 from disk."""
    delta_bytes: float
    """Bytes of a delta over those of the whole version."""
    delta_seconds: float
    """Seconds of a delta over those of bf16 from disk."""
    full_pause: float
    """Pause for a whole version over the time of bf16's reload."""
    delta_pause: float
    """Pause for a delta over the time of bf16's reload."""
    copies: float
    """Seconds of a whole version over those of copying its bytes once."""


def ratios(row: dict[str, Any]) -> Ratios:
    """Compute the ratios from the figures of one scheme."""
    seconds = row["seconds"]
    reload = seconds["bf16: load, paused"]

    def total(kind: str) -> float:
        return sum(value for name, value in seconds.items() if name.startswith(f"{kind}:"))

    disk = total("bf16")
    whole = total("whole")
    delta = total("delta")
    quantized = row["full_bytes"] - row["unquantized_bytes"]
    quantized_in_bf16 = row["bf16_bytes"] - row["unquantized_bytes"]
    return Ratios(
        full_bytes=row["full_bytes"] / row["bf16_bytes"],
        quantized_bytes=quantized / quantized_in_bf16,
        full_seconds=whole / disk,
        delta_bytes=row["delta_bytes"] / row["full_bytes"],
        delta_seconds=delta / disk,
        full_pause=seconds["whole: pause"] / reload,
        delta_pause=seconds["delta: pause"] / reload,
        copies=whole / seconds["copy once"],
    )


def table(data: dict[str, Any]) -> list[PlainTable]:
    """Return two tables: the seconds by kind of work, and the ratios."""
    rows = data["rows"]
    schemes = [row["scheme"] for row in rows]
    where = "memory" if data["in_memory"] else "disk"
    where = f"{where} and HTTP" if data["transfer"] == "http" else where
    seconds = PlainTable(
        "work",
        *schemes,
        figures=schemes,
        title=(
            f"Seconds of a publish to a running vLLM server, {data['shape']}, by way of {where};"
            " medians"
        ),
    )
    for name in rows[0]["seconds"]:
        seconds.add_row(name, *(f"{row['seconds'][name]:.4f}" for row in rows))
    figures = (
        "whole",
        "of bf16's bytes",
        "without embedding",
        "of bf16's time",
        "× a copy",
        "delta",
        "of whole",
        "of bf16's time, delta",
        "pause of bf16's",
        "delta's",
    )
    shown = PlainTable("scheme", *figures, figures=figures, title=f"A step at {data['lr']:g}")
    for row in rows:
        r = ratios(row)
        shown.add_row(
            row["scheme"],
            f"{row['full_bytes'] / 1e6:.0f} MB",
            f"{r.full_bytes:.2f}",
            f"{r.quantized_bytes:.2f}",
            f"{r.full_seconds:.2f}",
            f"{r.copies:.1f}",
            f"{row['delta_bytes'] / 1e6:.2f} MB",
            f"{r.delta_bytes:.2%}",
            f"{r.delta_seconds:.2f}",
            f"{r.full_pause:.1%}",
            f"{r.delta_pause:.1%}",
        )
    return [seconds, shown]
