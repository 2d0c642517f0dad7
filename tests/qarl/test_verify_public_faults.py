"""Faults that others lost days to, from the public threads that tell of them, rebuilt small: `qarl
verify` names each, with the layer and the remedy.

Blind spot: models of two layers; the threads' own models and kernels are not run.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import qarl
from qarl.quant.schemes import get_scheme
from qarl.verify import Cause
from tests.support import drawn_checkpoints as drawn
from tests.support.drawn_dumps import draw_model, quantized, sample, score

Tensors = drawn.Tensors


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Path, Tensors]:
    """Return a folder of random masters with experts, and its tensors."""
    folder = tmp_path / "masters"
    torch.manual_seed(0)
    drawn.masters(folder, random.Random(0), torch.bfloat16, "qwen3-moe")
    return folder, drawn.read(folder)


def layers_of(tensors: Tensors, scheme: str) -> list[str]:
    return [name for name in drawn.linears(tensors) if not get_scheme(scheme).leaves_alone(name)]


def only_fault(trainer: Any, engine: Path, config: Any = None) -> Cause:
    """Return the one fault of a comparison of weights."""
    (cause,) = qarl.verify.weights(trainer, engine, config).faults
    return cause


def test_a_router_quantized_on_one_side(experts: tuple[Path, Tensors], tmp_path: Path):
    """slime#1539, NeMo-RL#3614: the engine quantizes routers, the trainer keeps them in bf16."""
    folder, tensors = experts
    meant = drawn.quantization(tensors, "fp8")
    routers = [name for name in drawn.linears(tensors) if name.endswith("mlp.gate")]
    settings = meant | {"ignore": [name for name in meant["ignore"] if name not in routers]}
    codes = drawn.codes(tensors, "fp8", [*layers_of(tensors, "fp8"), *routers])
    engine = drawn.write(tmp_path / "engine", folder, codes, quantization_config=settings)
    cause = only_fault(folder, engine, meant)
    assert (cause.name, cause.about) == ("protected", tuple(routers))
    assert "router is quantized" in cause.evidence
    assert "mlp\\.gate$" in cause.remedy


def test_an_ignore_entry_that_matched_a_part_of_a_name(
    experts: tuple[Path, Tensors], tmp_path: Path
):
    """An entry `gate`, meant for the router, was matched as a substring by the converter, which
    left every gate_proj in bf16. The engine matches whole names, and expects codes.
    """
    folder, tensors = experts
    meant = drawn.quantization(tensors, "w4a16-g64")
    layers = layers_of(tensors, "w4a16-g64")
    left_out = [name for name in layers if "gate" in name]
    codes = drawn.codes(tensors, "w4a16-g64", [name for name in layers if name not in left_out])
    settings = meant | {"ignore": [*meant["ignore"], "gate"]}
    engine = drawn.write(tmp_path / "engine", folder, codes, quantization_config=settings)
    cause = only_fault(folder, engine)
    assert (cause.name, set(cause.about)) == ("ignore-list", set(left_out))
    assert "ignore 'gate' is a part of its name and does not match it" in cause.evidence


def test_layers_that_stayed_in_bf16(experts: tuple[Path, Tensors], tmp_path: Path):
    """verl#7519: the trainer means fp8 everywhere, and in the engine a kind of layer stayed in
    bf16, because its config lists it in `ignore`.
    """
    folder, tensors = experts
    meant = drawn.quantization(tensors, "fp8")
    layers = layers_of(tensors, "fp8")
    left_out = [name for name in layers if name.endswith("o_proj")]
    codes = drawn.codes(tensors, "fp8", [name for name in layers if name not in left_out])
    settings = meant | {"ignore": [*meant["ignore"], r"re:.*o_proj$"]}
    engine = drawn.write(tmp_path / "engine", folder, codes, quantization_config=settings)
    cause = only_fault(folder, engine, meant)
    assert (cause.name, cause.about) == ("ignore-list", tuple(left_out))
    assert "the engine leaves it in 16 or 32 bits (ignore 're:.*o_proj$')" in cause.evidence


def test_experts_in_another_order_after_a_reload(experts: tuple[Path, Tensors], tmp_path: Path):
    """verl#7986: a reload put every expert of one decoder layer into the next one's place."""
    folder, tensors = experts
    block = "model.layers.1.mlp.experts"
    shuffled = dict(tensors)
    moved = []
    for expert in range(4):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            moved.append(f"{block}.{expert}.{leaf}")
            shuffled[f"{moved[-1]}.weight"] = tensors[f"{block}.{(expert + 1) % 4}.{leaf}.weight"]
    settings = {"quantization_config": drawn.quantization(tensors, "fp8")}
    engine = drawn.write(tmp_path / "engine", folder, drawn.codes(shuffled, "fp8"), **settings)
    cause = only_fault(folder, engine)
    assert (cause.name, set(cause.about)) == ("expert-order", set(moved))


@pytest.mark.parametrize("applied", [True, False])
def test_training_without_the_fake_quantization_that_was_asked_for(tmp_path: Path, applied: bool):
    """miles: "four settings must agree", or a run "can succeed without applying fake quantization".
    The trainer then scores by its masters what 4-bit weights sampled.
    """
    _, model = draw_model(random.Random(3))
    engine = quantized(model, "w4a16")
    torch.manual_seed(0)
    prompts = torch.randint(1, 256, (40, 8))
    ids, sampled = sample(engine, prompts, 24)
    trainer = engine if applied else lambda tokens: model(tokens).logits.float()
    scored = score(trainer, prompts, ids)
    rows = [
        {"completion_ids": i, "sampler_logprobs": q, "trainer_logprobs": p}
        for i, q, p in zip(ids.tolist(), sampled.tolist(), scored.tolist(), strict=True)
    ]
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    report = qarl.verify.logprobs(dump)
    assert [cause.name for cause in report.faults] == ([] if applied else ["scheme"])
    if not applied:
        assert "train through the codes that the engine multiplies" in report.faults[0].remedy
