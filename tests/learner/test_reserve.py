"""What is held for the first step while the engine starts: as many bytes as that step then takes."""

import pytest

from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.reserve import reserved, step_bytes
from qarl.quant.runtime.shards import shard_parameters
from tests.support.learners import batch_of, make_learner


def test_bytes_are_those_of_gradients_and_moments():
    """Contract: counted before the first step, equal to what is there after it. Blind spot: DeepSpeed's shares are its
    own to allocate, and no GPU has held anything yet."""
    learner = make_learner(optimizer={"name": "muon"})
    counted = step_bytes(learner.model, learner.config, 1)
    with reserved(learner.model, learner.config, 1):
        learner.learn(batch_of(), 0)
    state = learner.backend.state_dict()["optimizer"]["masters"].values()
    moments = [t for master in state for part in master["moments"] for t in part.values() if t.ndim]
    gradients = sum(master.numel() for master in learner.model.masters.values())
    assert counted == 4 * (gradients + sum(t.numel() for t in moments))


def test_shares_and_offload():
    learner = make_learner("bf16", optimizer={"name": "adamw"})
    whole = sum(master.numel() for master in learner.model.masters.values()) * 4

    def held(processes: int, **settings: object) -> int:
        return step_bytes(learner.model, learner.config.model_copy(update=settings), processes)

    assert held(1) == 3 * whole and held(4) == 3 * whole
    assert held(4, zero_stage=1) == whole + 2 * whole // 4
    assert held(4, zero_stage=2) == 3 * whole // 4
    assert held(1, optimizer=OptimizerConfig(name="adamw", offload="cpu")) == whole
    shard_parameters(learner.model.module, 0, 4)
    learner.model.train_only(dict(learner.model.module.named_parameters()), ())
    assert held(4, zero_stage=3) == pytest.approx(3 * whole / 4, rel=0.02)
