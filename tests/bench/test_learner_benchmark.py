"""`python -m benchmarks learner`: that every trainer gets the same work, and that its parts add up."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.learner import measure as learner
from benchmarks.learner import table as learner_table
from benchmarks.learner.batch import Sequences, digest, draw_sequences
from benchmarks.learner.job import Job, Steps
from benchmarks.learner.step_memory import StepMemory
from benchmarks.learner.trl_worker import arguments, rows_a_forward
from benchmarks.learner.worker import run
from benchmarks.models import MODELS, write_model
from benchmarks.process import WorkerError, answer_line, last_answer
from tests.support.runs import ROOT

TRL = ROOT / ".venv-trl" / "bin" / "python"
SMALL = dataclasses.replace(MODELS["tiny"], prompts=2, samples=2, tokens=6)


def test_trl_gets_as_many_rows_as_the_budget_holds():
    """Contract: the largest number of sequences that divides an update's and whose padded size is within the budget;
    prompts and completions are padded each to their longest, 5 + 20 here. By hand: 4 rows are 100 tokens."""
    found = Sequences([[2] * 5, [2] * 3], 6, [[2] * 20] * 12, [[0.0] * 20] * 12, [0.0] * 12)
    assert [rows_a_forward(found, 1, budget) for budget in (10, 49, 50, 99, 100, 10**6)] == [1, 1, 2, 3, 4, 12]
    assert rows_a_forward(found, 2, 10**6) == 6
    given = arguments(Job("", "", "default", "bfloat16", 2, 50, 3, True), found, "out", False)
    assert given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] == 6  # an update's
    assert given["per_device_train_batch_size"] * given["steps_per_generation"] == 12  # a batch's
    assert given["max_steps"] == 2 * (1 + 3 + 1)  # warm-up, timed, memory


def test_the_split_sums_to_the_step_and_tokens_are_the_batch_s(tmp_path: Path):
    """Contract: the five phases lie within the step, none is missing, and each is counted once: with `rest` they are
    the step by definition, so what can fail is a negative rest, or one that holds most of it."""
    sequences = draw_sequences(SMALL, 0)
    sequences.save(tmp_path / "batch.json")
    write_model(SMALL, tmp_path, 0)
    job = Job(str(tmp_path), str(tmp_path / "batch.json"), "w4a16", "bfloat16", 2, 64, 3, True, "reference")
    found = run(job)
    for step in found.seconds:
        assert set(step) == {*learner.PHASES, "total", "cpu"} and min(step.values()) > 0
        assert 0 <= learner._rest(step) < 0.5 * step["total"]
    sequence = [[*sequences.prompts[i // 2], *c] for i, c in enumerate(sequences.completions)]
    assert found.digest == digest(sequence)
    assert found.total_bytes > 3 * 4 * 361216  # masters and both moments of AdamW
    assert Steps(**last_answer(answer_line(found))) == found


def test_step_memory_sees_what_was_freed_again_and_not_what_was_there():
    """Contract: 64 MiB that live only within the step are its peak; 32 MiB from before count in the total alone. Linux
    counts pages in batches, hence the MiB of tolerance."""
    memory = StepMemory(cuda=False)
    before = torch.ones(32 << 20, dtype=torch.uint8)
    memory.begin()
    torch.ones(64 << 20, dtype=torch.uint8)
    memory.end()
    assert 63 < memory.step / 2**20 < 72 and memory.total >= memory.step + before.nbytes - (1 << 20)


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


def test_a_failed_process_is_quoted(tmp_path: Path):
    job = Job(str(tmp_path), str(tmp_path / "none.json"), "bf16", "bfloat16", 1, 64, 1, False)
    with pytest.raises(WorkerError, match=r"none\.json"):
        learner._run("qarl", job, TRL, "")
