"""Tests of four processes against one, by either engine, and of what three read of their
checkpoints.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.run.checkpoint import load_checkpoint
from tests.support.learners import (
    assert_same_trajectory,
    batch_of,
    distances,
    masters_of,
    random_model,
)
from tests.support.one_process import LEARNER, MUON, plain, trained
from tests.support.profiles import thorough
from tests.support.runs import run_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not thorough(),
        reason="seven processes are a minute of CPU; `make test-thorough` starts them",
    ),
]
BATCHES = 5
"""Number of batches, of two updates each."""
OTHER = {"own": "deepspeed", "deepspeed": "own"}
"""Engine → the other one."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what four processes wrote, by engine, and three that went on by the other engine."""
    folder = tmp_path_factory.mktemp("four")
    random_model().save_pretrained(folder / "model")
    file = folder / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    learners = {"own": LEARNER, "deepspeed": {**LEARNER, "deepspeed": str(file)}}

    def job(name: str, learner: dict[str, Any], first: int, last: int, resume: Any) -> Any:
        return {
            "folder": str(folder / "model"),
            "scheme": "bf16",
            "dtype": "float32",
            "learner": learner,
            "batches": [first, last],
            "resume": resume,
            "save": str(folder / f"{name}.pt"),
        }

    launches = {
        4: [
            *(job(name, learner, 0, BATCHES, None) for name, learner in learners.items()),
            job("muon", MUON, 0, 2, None),
        ],
        3: [
            job(f"{name}, then {other}", learners[other], BATCHES, BATCHES + 1, str(folder / name))
            for name, other in OTHER.items()
        ],
    }
    for count, jobs in launches.items():
        (folder / "jobs.json").write_text(json.dumps(jobs))
        run_workers("learner_worker", folder / "jobs.json", folder / "log.txt", count)
    results = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
    return {**results, "folder": folder}


@pytest.mark.parametrize("engine", OTHER)
def test_four_processes_take_the_first_ten_steps_of_one(done: dict[str, Any], engine: str):
    """Contract: loss, gradient norm, clipped share and entropy of each batch, and the masters after
    ten updates, are those of one process up to the order of sums.
    """
    masters, _, numbers = trained(BATCHES)
    four = done[engine]
    assert sum(batch[4] for batch in numbers) == 10
    torch.testing.assert_close(
        torch.tensor(four["numbers"]), torch.tensor(numbers), rtol=2e-3, atol=2e-4
    )
    assert_same_trajectory(trained(0)[0], masters, four["state"]["masters"])


def test_muon_in_four_processes_is_muon_in_one(done: dict[str, Any]):
    """The tolerance is that of two processes (`test_muon_in_two_processes_is_muon_in_one`)."""
    moved, off = distances(
        trained(0)[0], trained(2, muon=True)[0], done["muon"]["state"]["masters"]
    )
    assert moved.mean() > 2e-5
    assert off.mean() <= 0.03 * moved.mean()


@pytest.mark.parametrize("engine", OTHER)
def test_three_processes_go_on_by_the_other_engine(done: dict[str, Any], engine: str):
    """Contract: the checkpoint of four processes is read by three, which step by the other engine,
    moments and step count included.
    """
    resumed = done[f"{engine}, then {OTHER[engine]}"]["state"]
    assert_same_trajectory(trained(0)[0], trained(BATCHES + 1)[0], resumed["masters"])
    steps = {float(moments["step"]) for moments in resumed["moments"].values()}
    assert steps == {2.0 * BATCHES + 2}


@pytest.mark.parametrize("engine", OTHER)
def test_one_process_goes_on_from_four(done: dict[str, Any], engine: str):
    ours, _ = plain(0)
    checkpoint = load_checkpoint(Path(done["folder"]) / engine)
    ours.load_state_dict(checkpoint.learner_state(ours))
    ours.learn(batch_of(), step=BATCHES)
    assert_same_trajectory(trained(0)[0], trained(BATCHES + 1)[0], masters_of(ours))
