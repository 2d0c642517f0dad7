"""Benchmark records: what `--json` writes beside the figures, and tables in docs that are made of them."""

import json
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest

from qarl.cli.options import write_json
from qarl.report.record import record

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "benchmarks/records").glob("*.json"))


def test_a_record_says_how_to_measure_it_again():
    made = record(["compare", "schemes", "--seeds", "0,1", "--json", "a b.json"], [{"x": 1}])
    assert made["command"] == "qarl compare schemes --seeds 0,1"
    speed = record(["speed", "--json=x", "--rounds", "1"], [], "python -m benchmarks")
    assert speed["command"] == "python -m benchmarks speed --rounds 1"
    assert made["data"] == [{"x": 1}]
    assert made["environment"]["device"].endswith("AMX") or "NVIDIA" in made["environment"]["device"]
    assert {"python", "torch", "transformers", "compressed-tensors"} <= made["environment"].keys()
    if (ROOT / ".git").exists():
        assert len(made["commit"].removesuffix(" with changes")) == 40


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_records_are_as_a_benchmark_wrote_them(file: Path):
    """Of a commit without changes, without NaN, which JSON has not."""
    read = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert read.keys() == {"command", "commit", "environment", "data"}
    assert read["command"].startswith(("qarl bench ", "qarl compare ", "python ")) and len(read["commit"]) == 40


def test_docs_agree_with_their_records():
    command = [sys.executable, "scripts/docs_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; write them anew with: python scripts/docs_tables.py"


def test_json_holds_no_nan(tmp_path: Path):
    write_json(str(tmp_path / "x.json"), {"low": nan, "rounds": [(1.0, inf)], "count": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"low": None, "rounds": [[1.0, None]], "count": 1}
