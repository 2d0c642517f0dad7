"""The records of `python -m benchmarks memory`: today's plan is within a tenth of the measured peak.

Blind spot: peaks are of the machine, the libraries and the commit that the records name, before vLLM's model was the
learner's graph.
"""

import json
from pathlib import Path

from benchmarks.memory import planned

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


def test_the_plan_is_within_a_tenth_of_what_was_measured():
    rows = [row for file in RECORDS.glob("memory-*.json") for row in json.loads(file.read_text())["data"]]
    assert {row["model"] for row in rows} >= {"40m", "150m", "70m-moe"} and len({row["scheme"] for row in rows}) == 3
    for row in rows:
        plan = planned(row["model"], row["scheme"], row.get("fields", {})).total
        assert abs(plan / row["measured"] - 1) <= 0.1, row
