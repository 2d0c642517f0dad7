"""A learner that computes in another dtype than the engine: its own forward and backward, the engine's bytes."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from qarl.configs.errors import ConfigError
from qarl.configs.load import config_from_tree
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.learner import Learner
from qarl.learner.optim.loss_scale import PrecisionError
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import Forward, LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, SchemeError
from qarl.sync.publisher import Publisher
from tests.support import Policies
from tests.support.engines import SEQUENCES, start_engine
from tests.support.learners import batch_of
from tests.support.models import (
    VOCABULARY,
    all_logits,
    cast,
    gradients,
    loss_of,
    low_bit,
    qwen3,
    same_stream,
    some_tokens,
    stream_bytes,
)
from tests.support.moe_models import CONFIGS, random_moe

operators_of = pytest.mark.parametrize("operators", ["transformers", "engine"])


def policy(kind: str) -> PreTrainedModel:
    return random_moe(CONFIGS["qwen3_moe"]) if kind == "experts" else qwen3(tied=kind == "tied")


def wrap(
    model: PreTrainedModel,
    scheme: str,
    dtype: torch.dtype,
    compute: torch.dtype | None,
    operators: str = "transformers",
    kernel: str = "reference",
) -> LowBitModel:
    """Unaligned where a compute dtype is given, else aligned."""
    return low_bit(model, scheme, dtype, kernel, operators, compute is None, compute)


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
@pytest.mark.parametrize(
    ("dtype", "compute"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("bfloat16", "bfloat16")]
)
@operators_of
def test_the_engine_sees_its_own_dtype_and_the_learner_another(kind: str, dtype: str, compute: str, operators: str):
    """Contract: the stream is that of an aligned learner in the engine's dtype, byte for byte, before and after the
    masters move; the forward is that of an unaligned model all in the compute dtype, bit for bit; within
    `Forward.PUBLISHED` it is the aligned one's, bit for bit, and afterwards what it was."""
    plain, tokens = policy(kind), some_tokens()
    engine, other = COMPUTE_DTYPES[dtype], COMPUTE_DTYPES[compute]
    model = wrap(copy.deepcopy(plain), "w4a16", engine, other, operators)
    aligned = wrap(copy.deepcopy(plain), "w4a16", engine, None, operators)
    alone = wrap(copy.deepcopy(plain), "w4a16", other, other, operators)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for moved in (False, True):
            if moved:
                for name, master in model.masters.items():
                    master.add_(torch.randn(master.shape, generator=generator) * 0.01)
                    for same in (aligned, alone):
                        same.masters[name].copy_(master)
                for each in (model, aligned, alone):
                    each.refresh()
            assert same_stream(model, stream_bytes(aligned))
            expected = all_logits(alone, tokens)
            assert expected.dtype == other and torch.equal(all_logits(model, tokens), expected)
            with model.forward_as(Forward.PUBLISHED):
                assert torch.equal(all_logits(model, tokens), all_logits(aligned, tokens))
            assert torch.equal(all_logits(model, tokens), expected)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_an_aligned_learner_can_be_asked_without_its_codes(kind: str):
    """Contract: in `Forward.UNQUANTIZED` an aligned model, moved by a refresh, is bit for bit the unaligned one of its
    masters; outside it is what it was. int8 activations are left out too."""
    plain, tokens = policy(kind), some_tokens()
    aligned = wrap(copy.deepcopy(plain), "w8a8", torch.bfloat16, None)
    unaligned = low_bit(plain, "w8a8", operators="transformers", aligned=False)
    for model in (aligned, unaligned):
        with torch.no_grad():
            for master in model.masters.values():
                master.mul_(1.01)
        model.refresh()
    expected = all_logits(aligned, tokens)
    with aligned.forward_as(Forward.UNQUANTIZED):
        assert torch.equal(all_logits(aligned, tokens), all_logits(unaligned, tokens))
    assert torch.equal(all_logits(aligned, tokens), expected)
    assert not torch.equal(all_logits(unaligned, tokens), expected)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_a_float32_learner_has_float32_gradients(kind: str):
    """Contract: gradients are those of autograd through transformers' fp32 model, to fp32's rounding, though the engine
    is bfloat16; bfloat16 anywhere in forward or backward would be off by 1e-3 and more."""
    plain, tokens = policy(kind), some_tokens()
    model = wrap(copy.deepcopy(plain), "w4a16", torch.bfloat16, torch.float32)
    found = gradients(model, tokens)
    loss_of(cast(plain, torch.float32)(input_ids=tokens).logits, tokens).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert float((found[name] - parameter.grad).norm() / parameter.grad.norm()) < 2e-5, name


@pytest.mark.parametrize(("dtype", "compute", "active"), [("bfloat16", "float16", True), ("float16", "float32", False)])
def test_the_loss_scale_follows_the_learners_dtype(dtype: str, compute: str, active: bool):
    model = wrap(qwen3(), "w4a16", COMPUTE_DTYPES[dtype], COMPUTE_DTYPES[compute])
    config = LearnerConfig.model_validate({"aligned": False, "compute_dtype": compute})
    assert Learner(model, config).loss_scale.active == active


def test_an_overflow_is_told_of_the_dtype_it_happened_in():
    """The norm's weight is beyond float16 and within bfloat16: the float16 learner is at fault, not its engine."""
    model = wrap(qwen3(vocab_size=VOCABULARY), "bf16", torch.bfloat16, torch.float16)
    with torch.no_grad():
        model.masters["model.norm.weight"].mul_(1e6)
    model.refresh()
    config = LearnerConfig.model_validate({"aligned": False, "compute_dtype": "float16"})
    with pytest.raises(PrecisionError, match=r"float16 forward: .* learner.compute_dtype"):
        Learner(model, config).learn(batch_of(), step=0)


def test_an_aligned_learner_has_no_dtype_of_its_own():
    with pytest.raises(ConfigError, match=r"compute_dtype 'float32' with learner.aligned true: .* engine's dtype"):
        config_from_tree({"learner": {"compute_dtype": "float32"}})
    assert config_from_tree({"learner": {"compute_dtype": "float32", "aligned": False}}).learner.compute_dtype
    with pytest.raises(SchemeError, match="aligned learner multiplies the engine's codes"):
        LayerContext(torch.bfloat16, "reference", compute_dtype=torch.float32)


@pytest.mark.slow
def test_the_canary_compares_the_published_codes(random_policy: Policies, tmp_path: Path):
    """Contract: with a float32 learner the canary still multiplies published codes in the engine's bfloat16: with the
    engine's operators it finds what an aligned learner finds, not the gap of the plain float32 forward."""
    folder = random_policy(True)
    model, aligned = (
        wrap(load_masters(folder, torch.float32), "w4a16", torch.bfloat16, compute, "engine", "vllm")
        for compute in (torch.float32, None)
    )
    engine = start_engine(model, folder, tmp_path / "start", "bfloat16")
    try:
        ours, theirs = (Publisher(m, engine, SEQUENCES, 0.05, 1).publish(1).canary for m in (model, aligned))
    finally:
        engine.close()
    assert ours is not None and ours == theirs and ours.mean_abs < 1e-3
