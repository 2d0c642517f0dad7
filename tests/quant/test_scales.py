"""Tests of scales that outlive a weight version: codes under them, and a start from given codes.

Also tests codes that are made again when needed instead of being kept
(`LowBitModel.release_codes`).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.materialize import by_operators, materialize
from qarl.quant.materialize.code_changes import Changed, quantized_weights
from qarl.quant.materialize.integer import integer_range
from qarl.quant.model.kept_scales import (
    check_scale_rule,
    keep_scales,
    load_scales_state,
    scales_state,
    start_from_codes,
)
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import MASTER_DTYPES, Scheme, SchemeError, get_scheme
from qarl.quant.types import LowBitTensor
from tests.support.learners import all_equal, random_model
from tests.support.models import (
    all_logits,
    loss_of,
    low_bit,
    multiply_masters,
    qwen3,
    some_tokens,
    stream_bytes,
)
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.tensors import as_bytes, heavy, normal, same_bits, seeded

INTEGERS = ("w4a16", "w4a16-g32", "w4a16-channel", "w8a16", "w8a8", "w4a8")


def codes_one_by_one(weight: torch.Tensor, scheme: Scheme, scale: torch.Tensor) -> torch.Tensor:
    """Return round(clamp(w / s)), code by code, with the quotient rounded to the wider of the two
    dtypes.
    """
    assert scheme.weights is not None
    low, high, _ = integer_range(scheme.weights.num_bits)
    columns = weight.shape[1] // scale.shape[1]
    dtype = torch.promote_types(weight.dtype, scale.dtype)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for o, row in enumerate(weight.tolist()):
        for i, value in enumerate(row):
            exact = value / scale[o, i // columns].item()
            quotient = float(torch.tensor(exact, dtype=torch.float64).to(dtype))
            # Python rounds halves to even
            codes[o, i] = round(min(max(quotient, low), high))
    return codes


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("master", MASTER_DTYPES.values(), ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32],
    ids=str,
)
def test_codes_under_a_kept_scale_are_those_of_a_slow_reference(
    name: str, master: torch.dtype, dtype: torch.dtype
):
    """Contract: materialize(…, scale=s) stores s and round(clamp(w / s)), by compiled loops and by
    torch's operators, fresh and into buffers. Values include some far beyond the codes' range,
    quotients that overflow the dtype, and ties. Blind spot: a float64 quotient rounded to float32
    could differ from float32's own; no seed shows one.
    """
    scheme = get_scheme(name)
    weight = heavy(5, 256, seed=3) * 0.05
    weight[1, :4] = torch.tensor([3e4, -3e4, 0.0, -0.0])
    groups = 256 // (scheme.group_size or 256)
    scale = (normal(5, groups, seed=4).abs() * 0.02 + 1e-3).to(dtype)
    scale[2] = 2.0**-6
    weight[2, :16] = torch.arange(-8, 8) * 2.0**-6 + 2.0**-7  # halves
    scale[3] = 2.0**-23
    weight = weight.to(master)
    expected = codes_one_by_one(weight, scheme, scale)
    out = materialize(weight.flip(1).contiguous(), scheme, dtype)
    for made in (
        materialize(weight, scheme, dtype, scale=scale),
        by_operators(weight, scheme, dtype, "layer", scale=scale),
        materialize(weight, scheme, dtype, scale=scale, out=out),
    ):
        assert made.scale is not None
        assert torch.equal(as_bytes(made.scale), as_bytes(scale))
        assert torch.equal(made.unpacked(), expected)
    with pytest.raises(ValueError, match="has a scale beyond"):
        materialize(
            weight,
            scheme,
            dtype,
            scale=scale.index_fill(0, torch.tensor(1), torch.inf),
        )
    with pytest.raises(ValueError, match="NaN or infinity"):
        materialize(weight.fill_(float("nan")), scheme, dtype, scale=scale)


def kept_model(model: PreTrainedModel, scheme: str) -> LowBitModel:
    kept = low_bit(model, scheme)
    keep_scales(kept)
    return kept


@pytest.mark.parametrize(
    "make",
    [random_model, lambda: random_moe(CONFIGS["qwen3_moe"])],
    ids=["dense", "experts"],
)
def test_kept_scales_do_not_change_when_masters_move(make: Callable[[], PreTrainedModel]):
    """Contract: keeping scales does not change the present version.

    Masters that move change all codes and no scale.
    """
    model = kept_model(make(), "w4a16")
    first = {item.name: item.tensor.clone() for item in model.low_bit_tensors()}
    model.refresh()
    assert all(torch.equal(item.tensor, first[item.name]) for item in model.low_bit_tensors())
    multiply_masters(model, 1.5)
    for item in model.low_bit_tensors():
        same = item.name.endswith(("weight_scale", "weight_shape"))
        assert torch.equal(item.tensor, first[item.name]) == same


def other_codes(model: LowBitModel) -> list[LowBitTensor]:
    """Return a version as a calibration might make it: every code within 2 of the rounded one,
    scales up to 20 % larger.
    """
    generator = seeded(5)
    for layer in model.low_bit_layers():
        for weight in quantized_weights(layer.low_bit):
            assert weight.scale is not None
            args = weight.scheme.weights
            assert args is not None
            low, high, _ = integer_range(args.num_bits)
            moved = weight.unpacked() + torch.randint(
                -2, 3, weight.shape, generator=generator, dtype=torch.int8
            )
            values = moved.clamp(low, high).float().view(
                *weight.scale.shape, -1
            ) * weight.scale.float().unsqueeze(-1)
            scale = weight.scale.clone()
            materialize(
                values.view(weight.shape),
                weight.scheme,
                scale.dtype,
                out=weight,
                scale=scale,
            )
            weight.scale.mul_(1.2)
    return [LowBitTensor(item.name, item.tensor.clone()) for item in model.low_bit_tensors()]


@pytest.mark.parametrize(
    "make",
    [random_model, lambda: random_moe(CONFIGS["qwen3_moe"])],
    ids=["dense", "experts"],
)
@pytest.mark.parametrize(
    ("scheme", "master"),
    [
        ("w4a16", torch.float32),
        ("w4a16", torch.bfloat16),
        ("w8a8", torch.float32),
    ],
    ids=str,
)
def test_a_start_from_given_codes_reproduces_them(
    make: Callable[[], Any], scheme: str, master: torch.dtype
):
    """Contract: after `start_from_codes` the masters, rounded to nearest under the kept scales,
    give every tensor of the given version bit for bit, now and at any later refresh, unquantized
    tensors included.
    """
    tensors = other_codes(kept_model(make().to(master), scheme))
    model = kept_model(make().to(master), scheme)
    before = {item.name: item.tensor.clone() for item in model.low_bit_tensors()}
    start_from_codes(model, tensors)
    model.refresh()
    ours = [(item.name, item.tensor) for item in model.low_bit_tensors()]
    theirs = [(item.name, item.tensor) for item in tensors]
    assert same_bits(ours, theirs)
    assert sum(not torch.equal(tensor, before[name]) for name, tensor in ours) > 10


def test_a_small_update_after_a_start_changes_few_codes():
    """Contract: moving masters by a hundredth of a scale changes a hundredth of the codes, as in a
    rounded model, because no master starts at a boundary.
    """
    model = kept_model(random_model(), "w4a16")
    start_from_codes(model, other_codes(kept_model(random_model(), "w4a16")))
    generator = seeded(7)
    for layer in filter(lambda layer: layer.keeps_scales, model.low_bit_layers()):
        for master, weight in zip(layer.masters, quantized_weights(layer.low_bit), strict=True):
            before = weight.unpacked()
            scale = weight.wide_scale()
            signs = torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
            with torch.no_grad():
                moves = 0.01 * signs * scale
                master.view(*scale.shape, -1).add_(moves.unsqueeze(-1))
            layer.refresh()
            changed = (weight.unpacked() != before).float().mean().item()
            assert 0.001 < changed < 0.02, changed


def test_an_unaligned_learner_starts_from_given_codes_with_unchanged_masters():
    """Contract: masters and forward do not change, the version is the given codes, and both survive
    a checkpoint that is loaded into a model with masters only.
    """
    tensors = other_codes(kept_model(random_model(), "w4a16"))
    model, resumed = (low_bit(random_model(), "w4a16", aligned=False) for _ in range(2))
    tokens = some_tokens()
    before = all_logits(model, tokens)
    start_from_codes(model, tensors, keep_masters=True)
    keep_scales(resumed)
    load_scales_state(
        resumed, {name: tensor.clone() for name, tensor in scales_state(model).items()}
    )
    resumed.refresh()
    for each in (model, resumed):
        assert torch.equal(all_logits(each, tokens), before)
        assert same_bits(
            *(
                [(item.name, item.tensor) for item in items]
                for items in (each.low_bit_tensors(), tensors)
            )
        )


def test_codes_that_masters_cannot_hold_are_refused():
    """Contract: codes of 8 bits need more significand than a bfloat16 master's 8 bits.

    A changed norm is no code and is refused.
    """
    tensors = other_codes(kept_model(random_model().bfloat16(), "w8a8"))
    with pytest.raises(
        SchemeError,
        match=r"cannot be made from masters in bfloat16; set learner\.master_dtype",
    ):
        start_from_codes(kept_model(random_model().bfloat16(), "w8a8"), tensors)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        pytest.param("bf16", "'kept' with scheme 'bf16', which has no scales", id="bf16"),
        pytest.param("fp8", "'kept' is for integer weights, and scheme 'fp8' of layer", id="fp8"),
        pytest.param("nvfp4a16", "scheme 'nvfp4a16' of layer", id="nvfp4a16"),
        pytest.param("fp8-block", "scheme 'fp8-block' of layer", id="fp8-block"),
    ],
)
def test_kept_scales_are_refused_for_schemes_without_integer_weights(scheme: str, message: str):
    plan = plan_layers(random_model(), get_scheme(scheme))
    with pytest.raises(SchemeError, match=message):
        check_scale_rule("kept", plan)
    check_scale_rule("minmax", plan)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "nvfp4"])
@pytest.mark.parametrize("way", ["codes alone", "kernels too", "scales are kept"])
def test_codes_that_are_not_kept_are_made_again_to_the_same_bits(scheme: str, kind: str, way: str):
    """Contract: logits, gradients and streams of each version are those of a model that keeps its
    codes. Between uses no code has a value, and no scale unless it is kept. This includes kernel
    layouts made at each use and scales kept from version to version.
    """
    if way == "scales are kept" and scheme == "nvfp4":
        pytest.skip("its scales are not kept")
    build = qwen3 if kind == "dense" else lambda: random_moe(CONFIGS["qwen3_moe"])
    models = [low_bit(build(), scheme) for _ in range(2)]
    if way == "scales are kept":
        for model in models:
            keep_scales(model)
    models[1].release_codes()
    if way == "kernels too":
        models[1].drop_kernels()
    tokens = some_tokens()
    for _ in range(2):
        streams = []
        grads = []
        for model in models:
            weights = [
                weight
                for layer in model.low_bit_layers()
                for weight in quantized_weights(layer.low_bit)
            ]
            assert {weight.codes.device.type for weight in weights} == {
                "cpu" if model is models[0] else "meta"
            }
            assert {weight.scale.device.type for weight in weights if weight.scale is not None} == {
                "cpu" if model is models[0] or way == "scales are kept" else "meta"
            }
            loss_of(all_logits(model, tokens), tokens).backward()
            grads.append({name: master.grad for name, master in model.masters.items()})
            streams.append(stream_bytes(model))
            stacks = list(model._layers.stacks.values())
            if model is models[0]:
                assert all(stack._kernel for stack in stacks)
            elif way == "kernels too":
                assert not any(layer._kernel for layer in (*stacks, *model.low_bit_layers()))
            with torch.no_grad():
                for master in model.masters.values():
                    assert master.grad is not None
                    master.sub_(master.grad, alpha=0.5)
                    master.grad = None
            model.refresh()
        assert all_equal(*streams)
        assert all_equal(*grads)


def test_the_fraction_of_changed_codes_is_over_all_added_layers():
    codes = Changed()
    assert codes.share is None
    codes.add(1, 4)
    codes.add(2, 4)
    assert codes.share == 3 / 8
