"""The tables of scripts/gpu_half_hour.sh, and the reward of its runs.

    python scripts/gpu_half_hour.py OUT

OUT is the script's folder of results. It receives tables.md, where a run that failed has its last
line, and record/gpu-half-hour.json, a record for benchmarks/records.
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


def figures_of(folder: Path, name: str, scheme: str) -> dict[str, Any]:
    """Return a run's figures; without a result only "failure", which says why."""
    row: dict[str, Any] = {"scheme": scheme, "bitwise": name != scheme}
    failure = failure_of(folder, name)
    steps = steps_of(folder, name)
    if failure or not steps:
        return row | {"failure": failure or "no step"}
    first = steps[0]
    last = steps[-1]  # warmed up, and with a publish before it
    tokens = last["response_tokens"] * last["prompts"] * SAMPLES
    return row | {
        "mean_abs": first[RECORDED + "mean_abs"],
        "max_abs": first[RECORDED + "max_abs"],
        "equal": first[RECORDED + "equal"],
        "tokens_per_second": tokens / last["seconds/sample"],
        "step_seconds": last["seconds/sample"] + last["seconds/learn"],
        "publish_seconds": last["seconds/publish"],
        "memory_gib": largest_memory(folder, name),
    }


def results_of(folder: Path) -> dict[str, Any]:
    """Return the figures of both kinds of runs, and status and seconds of every step."""
    runs = [
        figures_of(folder, scheme + suffix, scheme)
        for suffix in ("", "-bitwise")
        for scheme in SCHEMES
    ]
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    steps = [json.loads(file.read_text()) for file in files]
    return {"runs": runs, "steps": [step for step in steps if "step" in step]}


def tables(results: dict[str, Any]) -> str:
    """Return the markdown of three tables: without and with `--bitwise true`, and all steps.

    A run that passed has had its export answered by a fresh engine.
    """
    lines = []
    for title, bitwise in (("Without", False), ("With", True)):
        lines += [
            f"{title} `--bitwise true`:",
            "",
            "| scheme | mean \\|Δ log p\\|, nats | largest | equal | sampled tokens/s"
            " | s a step (to bf16) | s a publish | GiB in use |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        base = None
        for row in results["runs"]:
            if row["bitwise"] != bitwise:
                continue
            if "failure" in row:
                lines.append(f"| `{row['scheme']}` | {row['failure']} | | | | | | |")
                continue
            seconds = row["step_seconds"]
            cells = (
                f"`{row['scheme']}`",
                f"{row['mean_abs']:.3g}",
                f"{row['max_abs']:.3g}",
                f"{100 * row['equal']:.2f} %",
                f"{row['tokens_per_second']:,.0f}",
                f"{seconds:.1f}" + (f" ({seconds / base:.2f})" if base else ""),
                f"{row['publish_seconds']:.2f}",
                row["memory_gib"],
            )
            base = base or seconds
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    steps = results["steps"]
    lines += [
        f"| {' | '.join(['step', *(step['step'] for step in steps)])} |",
        f"|---|{'---:|' * len(steps)}",
        f"| {' | '.join(['status', *(str(step['status']) for step in steps)])} |",
        f"| {' | '.join(['seconds', *(str(step['seconds']) for step in steps)])} |",
    ]
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    """Print the tables, and write them and the record that docs/lab takes its tables from."""
    from qarl.report.record import record

    results = results_of(folder)
    made = record([folder.name], results, "python scripts/gpu_half_hour.py")
    commit = Path(__file__).parents[2] / "commit"  # where the pieces were put together
    if commit.exists():
        made["commit"] = commit.read_text().strip()
    (folder / "record").mkdir(exist_ok=True)
    text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    (folder / "record/gpu-half-hour.json").write_text(text, encoding="utf-8")
    (folder / "tables.md").write_text(tables(results), encoding="utf-8")
    print(tables(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
