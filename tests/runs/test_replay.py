"""Learning again from a run's recorded completions, without an engine."""

from pathlib import Path

import pytest
import torch

from tests.support.runs import SMALL, lines, succeeded

RECORDED = [*SMALL, "--steps", "2", "--eval.problems", "0", "--export", "false", "--record", "all"]
MORE = ["--learner.kl.name", "k3", "--objective", "grpo", "--rollout.dynamic_sampling", "1"]


def masters(run: Path, step: int) -> dict[str, torch.Tensor]:
    state = torch.load(run / "checkpoints" / f"step-{step:06d}" / "state-00000.pt", weights_only=True)
    return state["learner"]["masters"]


@pytest.mark.slow
def test_a_replay_is_the_recorded_run_to_the_last_bit(tmp_path: Path):
    """Contract: every metric of the learner, every version's digest, all masters and what is recorded of every token
    are those of the run with an engine. Blind spot: one process; groups that dynamic sampling dropped are not on
    record, so figures of all that was sampled are left out."""
    run, again = (tmp_path / name for name in ("run", "again"))
    succeeded("train", *RECORDED, *MORE, "--output", run)
    done = succeeded("train", "--from-rollouts", run, "--output", again)
    assert f"equal to {run} to the last bit, in all 2 steps" in done.stdout
    assert not (again / "engine-start").exists() and not (again / "export").exists()
    for before, after in zip(lines(run), lines(again), strict=True):
        of_the_learner = [name for name in before if name.startswith(("learn/", "digest", "weight_version"))]
        assert len(of_the_learner) > 40 and [before[n] for n in of_the_learner] == [after[n] for n in of_the_learner]
    first, second = masters(run, 2), masters(again, 2)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    for step in (1, 2):
        name = f"tokens/step-{step:06d}.parquet"
        assert (run / name).read_bytes() == (again / name).read_bytes()
