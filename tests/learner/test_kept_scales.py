"""Learning under kept scales, and what a checkpoint holds of them."""

import io

import pytest
import torch

from qarl.configs.errors import ConfigError
from qarl.learner.learner import Learner
from qarl.quant.model.kept_scales import keep_scales
from tests.support.learners import all_equal, batch_of, make_learner, masters_of
from tests.support.tensors import as_bytes


def kept_learner(seed: int = 0) -> Learner:
    learner = make_learner("w4a16", seed=seed, optimizer={"lr": 1e-2})
    keep_scales(learner.model)
    return learner


def stream_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {item.name: as_bytes(item.tensor).clone() for item in learner.model.low_bit_tensors()}


def test_a_restored_learner_continues_bit_for_bit():
    """Contract: a batch changes codes and no scale; and learn, save, load into a learner of other initial weights and
    scales, learn on = learn on: masters and published bytes."""
    learner = kept_learner()
    first = stream_of(learner)
    learner.learn(batch_of(0), step=0)
    changed = {name.rpartition(".")[2] for name, tensor in stream_of(learner).items() if not first[name].equal(tensor)}
    assert changed == {"weight", "weight_packed"}
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    other = kept_learner(seed=5)
    other.load_state_dict(torch.load(file))
    assert all_equal(stream_of(learner), stream_of(other))
    assert learner.learn(batch_of(1), step=1) == other.learn(batch_of(1), step=1)
    assert all_equal(masters_of(learner), masters_of(other))
    assert all_equal(stream_of(learner), stream_of(other))


def test_a_checkpoint_of_another_rule_is_refused():
    state = kept_learner().state_dict()
    with pytest.raises(ConfigError, match="keeps the scales of 14 weights, this run those of 0"):
        make_learner("w4a16").load_state_dict(state)
