"""Tests of the floor under the bounds of canary and gate: correct implementations stay within the
bound, planted faults do not.

Models are random with two layers, and there is no engine: the learner's graph equals the engine's
model bit for bit. docs/lab/floor.md has a real model's figures. Blind spot: GPUs.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from qarl.configs.schema.run import LayerRule
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.row_check import RowCheck
from qarl.quant.schemes import get_scheme
from qarl.sync.floor import (
    OTHER_KERNELS_TOLERANCE,
    SAME_KERNELS_TOLERANCE,
    FixedSequences,
    tolerance,
)
from tests.support.models import qwen3
from tests.support.profiles import thorough
from tests.support.tensors import seeded

SEEDS = range(12 if thorough() else 3)
SCHEMES = ("bf16", "w8a8", "w4a16")
_TOKENS = [torch.randint(0, 96, (48,), generator=seeded(n)) for n in range(8)]
SEQUENCES = [tokens.tolist() for tokens in _TOKENS]


def model_of(
    masters: PreTrainedModel, scheme: str, operators: str = "engine", **changes: Any
) -> LowBitModel:
    kernel = "vllm" if operators == "engine" else "reference"
    context = LayerContext(torch.bfloat16, kernel)
    return LowBitModel(copy.deepcopy(masters), get_scheme(scheme), context, operators, **changes)


def distance(a: LowBitModel, b: LowBitModel) -> float:
    """Return the mean |Δ log p| of the fixed sequences, nats per token."""
    fixed = FixedSequences(a, SEQUENCES)
    difference = fixed.logprobs() - FixedSequences(b, SEQUENCES).logprobs()
    return float(difference[fixed.response_mask].abs().mean())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_implementation_is_within_its_bound(scheme: str, seed: int):
    """Contract: transformers' operators over dequantized codes, a correct implementation, are
    within the bound of the engine's model, whichever of the two the floor is measured on.
    """
    masters = qwen3(seed=seed)
    engine = model_of(masters, scheme)
    right = model_of(masters, scheme, "transformers")
    for model in (engine, right):
        floor = FixedSequences(model, SEQUENCES).floor().mean_abs
        assert 0 < distance(engine, right) < OTHER_KERNELS_TOLERANCE * floor


def stale(masters: PreTrainedModel) -> PreTrainedModel:
    """Move every master by 2e-4 up or down, as one step of AdamW does."""
    moved = copy.deepcopy(masters)
    generator = seeded(1)
    for master in moved.parameters():
        master.data.add_(2e-4 * torch.randn(master.shape, generator=generator).sign())
    return moved


def permuted(masters: PreTrainedModel) -> PreTrainedModel:
    """Swap two rows of one down projection."""
    moved = copy.deepcopy(masters)
    weight: Any = moved.get_submodule("model.layers.1.mlp.down_proj").weight
    weight.data[[0, 1]] = weight.data[[1, 0]]
    return moved


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "fault",
    ["group size", "stale version", "one layer in another scheme", "two rows swapped"],
)
def test_planted_faults_are_beyond_the_bound_of_equal_kernels(fault: str, seed: int):
    """Contract: if both sides have the same exact kernels, the smallest faults are detected.

    They move log-probs by as much as other roundings do, and the bound is a tenth of that.
    """
    masters = qwen3(seed=seed)
    engine = model_of(masters, "w4a16")
    rules = [LayerRule(match="model.layers.1.self_attn.o_proj", scheme="w8a8")]
    wrong = {
        "group size": lambda: model_of(masters, "w4a16-g64"),
        "stale version": lambda: model_of(stale(masters), "w4a16"),
        "one layer in another scheme": lambda: model_of(masters, "w4a16", rules=rules),
        "two rows swapped": lambda: model_of(permuted(masters), "w4a16"),
    }[fault]()
    floor = FixedSequences(engine, SEQUENCES).floor().mean_abs
    assert distance(engine, engine) == 0
    assert distance(engine, wrong) > SAME_KERNELS_TOLERANCE * floor


def test_another_rounding_moves_a_result_by_at_most_one_place():
    context = LayerContext(torch.bfloat16, "reference")
    values = torch.randn(64, 512, generator=seeded(0)).bfloat16()
    with context.other_roundings(seed=3):
        moved = context.rounded(values)
    assert torch.equal(context.rounded(values), values)
    bits = values.view(torch.int16).int()
    places = (moved.view(torch.int16).int() - bits).abs()
    assert int(places.max()) == 1
    assert 0.1 < float((places > 0).float().mean()) < 0.6


def test_exact_kernels_get_the_tolerance_of_equality():
    model = model_of(qwen3(), "w8a8")
    exact = RowCheck(kernels=3, threads=2, dependent=())
    assert tolerance(model, exact) == SAME_KERNELS_TOLERANCE
    assert tolerance(model, None) == OTHER_KERNELS_TOLERANCE
    dependent: Any = RowCheck(kernels=3, threads=2, dependent=(object(),))  # type: ignore[arg-type]
    assert tolerance(model, dependent) == OTHER_KERNELS_TOLERANCE
    assert tolerance(model_of(qwen3(), "w8a8", "transformers"), exact) == OTHER_KERNELS_TOLERANCE
