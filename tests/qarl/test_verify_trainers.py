"""`qarl verify` on weights and dumps in the shapes of TRL, verl, prime-rl and NeMo-RL.

`python -m benchmarks.verify --form trainers` draws more of them (docs/lab/verify.md). Blind spot:
none of the four trainers runs; TRL's is run by tests/runs/test_trl.py.
"""

import random
from pathlib import Path

import pytest
import torch

import qarl
from tests.support import drawn_checkpoints
from tests.support.trainer_shapes import (
    LOGPROB_CLEAN,
    LOGPROB_FAULTS,
    TRAINERS,
    draw_dump,
    draw_weights,
    weight_faults,
)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_fault_in_a_trainers_weights_is_named(tmp_path: Path, trainer: str, clean: bool):
    rng = random.Random(f"weights-{trainer}-{clean}")
    torch.manual_seed(rng.randrange(2**31))
    kind = rng.choice(drawn_checkpoints.CLEAN if clean else weight_faults(trainer))
    drawn = draw_weights(trainer, rng, kind, tmp_path)
    report = qarl.verify.weights(drawn.trainer, drawn.engine, drawn.config)
    names = [cause.name for cause in report.faults]
    assert names == ([] if clean else [kind]), (drawn.said, report.lines())


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_fault_in_a_trainers_dump_is_named(tmp_path: Path, trainer: str, clean: bool):
    """TRL's and verl's dumps are written by the lines of docs/guide/verify.md."""
    rng = random.Random(f"dump-{trainer}-{clean}")
    torch.manual_seed(rng.randrange(2**31))
    kind = rng.choice(LOGPROB_CLEAN if clean else LOGPROB_FAULTS)
    dump = draw_dump(trainer, rng, kind, tmp_path)
    report = qarl.verify.logprobs(dump.folder)
    names = [cause.name for cause in report.faults]
    assert names == ([] if clean else [kind]), (dump.said, report.lines())
