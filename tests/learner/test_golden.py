"""What short runs computed when this was recorded, kept so that a refactoring that changes it is
seen.

Masters are filled by integer arithmetic, so every machine starts from the same bits. Low-bit
tensors are then the same on every machine, and so are their digests: compared exactly. A trajectory
goes through products that other CPUs sum in another order: compared within a tolerance, far below
what a wrong bound, mask or scale does. Blind to what a real engine does (tests/engine) and to
everything that needs more than three updates.

Record anew, where a change is meant: tests/support/records.py.
"""

import dataclasses
import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from qarl.learner.diagnostics.token_log import TokenLog
from qarl.learner.objectives import OBJECTIVES
from tests.support.cases import cases
from tests.support.learners import batch_of, logprobs_of, make_learner, random_model
from tests.support.models import low_bit
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.records import assert_recorded

DIGESTS = [
    "bf16",
    "w4a16",
    "w4a16-channel",
    "w8a8",
    "w4a8",
    "fp8",
    "fp8-block",
    "nvfp4",
    "mxfp4a16",
    "moe",
]
TRAJECTORIES = ["w4a16", "w8a8"]
STATISTICS: dict[str, dict[str, Any]] = cases(__file__, "settings")
_ONCE = {"mini_batches": 1, "optimizer": {"name": "adamw", "lr": 1e-3}}
STATISTICS |= {
    name: {"objective": {"name": name}, **_ONCE} for name in OBJECTIVES if name not in STATISTICS
}
"""Compared unquantized in fp32: other CPUs' numbers differ by 1e-4 of them, lost updates, which are
few, by 2e-5.
"""
FIRST = (1e-3, 1e-4)
LATER = (0.06, 0.02)
"""Relative and absolute tolerances of the first batch, and of those after an update: codes flip
where a master's last bit differs. Measured between AVX-512 and AVX2 products: below 1e-6 in the
first batch; later 0.044 (gradient norm) and
0.018 (loss, on a CPU that has AVX2 alone).
"""


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Every parameter from a multiplicative hash of its elements' numbers: exact in integers, one
    rounding to fp32.
    """
    for number, parameter in enumerate(model.parameters()):
        hashed = (
            torch.arange(parameter.numel()) * 40503 + number * 7919
        ) * 2654435761 % 65536 - 32768
        values = (hashed.to(torch.float32) / 32768).view(parameter.shape)
        parameter.copy_(values * 0.25 if parameter.ndim > 1 else 1 + values / 4)


def digest(name: str) -> str:
    """SHA-256 of the published stream: names, dtypes, shapes and bytes. Not by `quant.digest`,
    which may change.
    """
    masters = random_moe(CONFIGS["qwen3_moe"]) if name == "moe" else random_model()
    fill(masters)
    model = low_bit(masters, "w4a16-g32" if name == "moe" else name)
    total = hashlib.sha256()
    for item in model.low_bit_tensors():
        total.update(f"{item.name}|{item.tensor.dtype}|{tuple(item.tensor.shape)}|".encode())
        total.update(
            hashlib.sha256(
                item.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ).digest()
        )
    return total.hexdigest()


def trajectory(scheme: str) -> list[dict[str, float]]:
    """What two batches measured, of a policy that is the same on every machine."""
    learner = make_learner(
        scheme,
        torch.float32,
        mini_batches=1,
        objective={"name": "grpo"},
        correction={"name": "token_mis"},
        optimizer={"lr": 2e-5},
    )
    fill(learner.model)
    learner.model.refresh()
    steps = []
    for step in range(2):
        stats = learner.learn(batch_of(step), step)
        steps.append(
            {name: getattr(stats, name) for name in ("loss", "grad_norm", "entropy", "corrected")}
        )
    return steps


def statistics(name: str) -> list[dict[str, float]]:
    """Every number that two batches report, and the second's log of tokens; the sampler is off by
    up to 1 nat.
    """
    reference = low_bit(random_model(), "bf16", torch.float32) if "kl" in STATISTICS[name] else None
    config = {"mini_batches": 2, "diagnostics_every": 1, **STATISTICS[name]}
    learner = make_learner("bf16", torch.float32, reference=reference, **config)
    steps = []
    for model in filter(None, (learner.model, reference)):
        fill(model)
        model.refresh()
    for step in range(2):
        batch = batch_of(step)
        own = logprobs_of(learner, batch).values
        noise = torch.sin(torch.arange(own.numel()) * 1.7).view(own.shape) * batch.response_mask
        behind = (torch.arange(own.shape[1]) % 3 * batch.response_mask).long() if step else None
        batch = dataclasses.replace(batch, sampler_logprobs=own + noise, versions_behind=behind)
        log = TokenLog(batch, [1, 5]) if step else None
        steps.append(
            numbers(learner.learn(batch, step, log=log)) | ({} if log is None else of_log(log))
        )
    return steps


def of_log(log: TokenLog) -> dict[str, float]:
    """What a log of tokens comes to."""
    clipped = dict(enumerate(log.clip.flatten().bincount().tolist()))
    rows = {
        "updated": log.updated,
        "known": log.known,
        "age": log.age,
        "unquantized": log.unquantized.known,
    }
    sums = {
        "old": log.old,
        "log_ratio": log.log_ratio.abs(),
        **{name: tensor.double() for name, tensor in rows.items()},
    }
    return numbers(
        {
            **{name: float(tensor.sum()) for name, tensor in sums.items()},
            "clip": clipped,
        },
        "log",
    )


def numbers(value: Any, name: str = "") -> dict[str, float]:
    """The numbers within a statistic, by their path; seconds left out."""
    if isinstance(value, float | int):
        return {name: value}
    parts = (
        dict(enumerate(value))
        if isinstance(value, tuple)
        else value
        if isinstance(value, dict)
        else vars(value)
    )
    some = (
        numbers(p, f"{name}.{key}")
        for key, p in parts.items()
        if p is not None and key != "seconds"
    )
    return {key: number for part in some for key, number in part.items()}


@pytest.mark.parametrize("name", DIGESTS)
def test_low_bit_tensors_are_those_recorded(name: str):
    assert_recorded(__file__, f"digest of {name}", digest(name))


@pytest.mark.parametrize("scheme", TRAJECTORIES)
def test_a_short_trajectory_is_the_one_recorded(scheme: str):
    for step, now in enumerate(trajectory(scheme)):
        assert_recorded(__file__, f"{scheme}, batch {step}", now, within=LATER if step else FIRST)


@pytest.mark.parametrize("name", STATISTICS)
def test_every_statistic_is_the_one_recorded(name: str):
    for step, now in enumerate(statistics(name)):
        few = {key: now.pop(f".records.{key}") for key in ("lost_updates", "crossed_bfloat16")}
        assert_recorded(__file__, f"{name}, batch {step}, few", few, within=(0.2, 3e-5))
        assert_recorded(__file__, f"{name}, batch {step}", now, within=(5e-3, 1e-6))
