"""The tables of scripts/gpu_half_hour.sh, and the reward of its runs.

    python scripts/gpu_half_hour.py OUT

OUT is the script's folder of results. The tables are markdown; a run that failed has its last line.
"""

import json
import sys
from pathlib import Path
from typing import Any

SCHEMES = ("bf16", "w8a8", "fp8", "w4a16")
SAMPLES = 8
"""Answers to a prompt, as the script has them."""
RECORDED = "learn/mismatch/"


def letters(problem: Any, text: str) -> float:
    """Return the share of ASCII letters, a reward that random weights obtain in different parts.

    Groups of equal rewards would teach nothing, and nothing would be published.
    """
    return sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1)


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return a run's metrics by step; empty if it has none."""
    file = folder / "runs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "seconds/sample" in row]


def failure_of(folder: Path, name: str) -> str:
    """Return why a step has no result; "" if it passed."""
    file = folder / f"{name}.json"
    if not file.exists():
        return "not run"
    status = json.loads(file.read_text())["status"]
    lines = (folder / f"{name}.log").read_text().strip().splitlines()
    return f"status {status}: {lines[-1] if lines else 'no output'}" if status else ""


def largest_memory(folder: Path, name: str) -> str:
    """Return the largest memory that nvidia-smi saw in use, in GiB; "–" without a GPU."""
    file = folder / f"{name}.mib"
    values = (
        [int(line) for line in file.read_text().split() if line.isdigit()] if file.exists() else []
    )
    return f"{max(values) / 1024:.1f}" if values else "–"


def row_of(folder: Path, name: str, scheme: str, base: float | None) -> tuple[str, float | None]:
    """Return a run's row of the table, and its seconds a step.

    base: seconds a step in bf16, to which the others are compared.
    """
    failure = failure_of(folder, name)
    steps = steps_of(folder, name)
    if failure or not steps:
        return f"| `{scheme}` | {failure or 'no step'} | | | | | | | |", None
    first = steps[0]
    last = steps[-1]  # warmed up, and with a publish before it
    tokens = last["response_tokens"] * last["prompts"] * SAMPLES / last["seconds/sample"]
    seconds = last["seconds/sample"] + last["seconds/learn"]
    cells = (
        f"`{scheme}`",
        f"{first[RECORDED + 'mean_abs']:.3g}",
        f"{first[RECORDED + 'max_abs']:.3g}",
        f"{100 * first[RECORDED + 'equal']:.2f} %",
        f"{tokens:,.0f}",
        f"{seconds:.1f}" + (f" ({seconds / base:.2f})" if base else ""),
        f"{last['seconds/publish']:.2f}",
        largest_memory(folder, name),
        "yes" if (folder / f"{name}.json").exists() else "no",
    )
    return f"| {' | '.join(cells)} |", seconds


def tables(folder: Path) -> str:
    """Return both tables, without and with `--bitwise true`."""
    lines = []
    for title, suffix in (("without", ""), ("with", "-bitwise")):
        lines += [
            "",
            f"{title.capitalize()} `--bitwise true`:",
            "",
            "| scheme | mean \\|Δ log p\\|, nats | largest | equal | sampled tokens/s"
            " | s a step (to bf16) | s a publish | GiB in use | export answered |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---|",
        ]
        base: float | None = None
        for scheme in SCHEMES:
            row, seconds = row_of(folder, scheme + suffix, scheme, base)
            base = base or seconds
            lines.append(row)
    return "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":
    result = tables(Path(sys.argv[1]))
    (Path(sys.argv[1]) / "tables.md").write_text(result)
    print(result)
