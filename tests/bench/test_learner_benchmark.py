"""`python -m benchmarks learner`: its ratios."""

import pytest

from benchmarks.learner import measure as learner
from benchmarks.learner import table as learner_table
from benchmarks.learner.job import Steps


def test_ratios_are_between_processes_of_one_round():
    """Contract: medians of each round's own ratio. By hand: rounds of 1, 2 and 8 s for bf16 and of 2, 2 and 4 s for
    w4a16 have the ratios 2, 1 and 1/2; TRL's quickest settings take 4, 1 and 2 s, so w4a16 has 1/2, 2 and 2."""

    def steps(*seconds: float) -> list[Steps]:
        return [Steps([{"total": s, "cpu": 2 * s, "old": s / 4, "materialize": s / 50}], 400, 800, "") for s in seconds]

    found = {
        ("qarl", "bf16"): steps(1, 2, 8), ("qarl", "w4a16"): steps(2, 2, 4),
        ("trl", "default"): steps(4, 3, 2), ("trl", "no-checkpointing"): steps(8, 1, 3),
    }  # fmt: skip
    rows = {(r.trainer, r.setting): r for r in learner._rows("tiny", 10, 100, found)}
    low = rows["qarl", "w4a16"]
    assert (low.seconds, low.against_bf16, low.against_trl) == (2, 1, 2)
    assert low.cpu_seconds == 4 and low.tokens_per_second == 50 and low.materialize_share == pytest.approx(0.02)
    assert rows["trl", "default"].phases == {} and rows["trl", "default"].against_trl == 1
    assert learner_table.table(list(rows.values()), "bfloat16").texts()[4:]
