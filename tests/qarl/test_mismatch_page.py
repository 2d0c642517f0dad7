"""`qarl mismatch`: layer by layer on tiny models in process, with a wrong layer planted; the page
without a browser. Pitfalls: each planted in a healthy set-up is found by its name, and healthy ones
of every kind give none. Policies are random logits there, so what engines and tokenizers do of
themselves is not seen.
"""

import dataclasses
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qarl.configs.load import load_config
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch, make_batch
from qarl.mismatch import investigate as mismatch
from qarl.mismatch.investigate import (
    LEARNERS,
    Investigation,
    LayerDeviation,
    ScoredLearner,
    scored_learners,
)
from qarl.mismatch.page import FAULTY, POINTS, faulty_layers, findings, mismatch_page
from qarl.mismatch.pitfalls import Evidence, find_pitfalls
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.types import LowBitTensor
from qarl.rollout.types import Completion, Group, Prompt
from qarl.run.policy import open_inputs
from tests.support.expected import assert_expected, finding_lines
from tests.support.learners import batch_of, make_groups, random_model
from tests.support.models import low_bit, multiply_masters, same_stream, stream_bytes
from tests.support.moe_models import CONFIGS, random_moe

WRONG = "model.layers.1.mlp.up_proj"
Three = tuple[LowBitModel, LowBitModel, LowBitModel]


def test_a_start_from_codes_is_what_is_measured(random_policy: Any, monkeypatch: Any):
    """Contract: with `--init gptq` the engine is opened on its codes, which are not those of the
    rounded masters.
    """
    folder = random_policy(True)
    opened = []
    other = low_bit(load_masters(folder, torch.float32), "w4a16")
    multiply_masters(other, 1.5, "model.layers.0.mlp.up_proj.weight")
    codes = [LowBitTensor(item.name, item.tensor.clone()) for item in other.low_bit_tensors()]
    monkeypatch.setattr(mismatch, "initial_codes", lambda policy, config: codes)
    monkeypatch.setattr(
        mismatch, "engine_of", lambda model, *of: opened.append(stream_bytes(model))
    )
    options = {
        "model": str(folder),
        "scheme": "w4a16",
        "quantization.scale": "kept",
        "quantization.init": "gptq",
    }
    config = load_config(None, options)
    # where it would begin to sample
    with pytest.raises(TypeError, match="context manager"):
        mismatch.investigate(config, open_inputs(config))
    assert same_stream(other, opened[0])


def three(scheme: str, moe: bool = False) -> Three:
    """plain, fake-quant and aligned."""
    models = []
    for kind in LEARNERS.values():
        masters = random_moe(CONFIGS["qwen3_moe"]) if moe else random_model()
        models.append(
            low_bit(
                masters,
                scheme,
                kernel=kind.kernel,
                operators=kind.operators,
                aligned=kind.aligned,
            )
        )
    plain, dequantized, aligned = models
    return plain, dequantized, aligned


def test_a_wrong_layer_is_found_and_named():
    """One layer of the aligned learner multiplies with scales 10 % too large, inside the stack the
    engine makes of gate and up: its kernel error is 0.1, within 5 %, no other layer is named, and
    the scheme's errors are as before.
    """
    models = three("w4a16")
    batch = batch_of()
    before = {row.layer: row for row in mismatch.layer_errors(*models, batch)}
    weight = models[2].linears[WRONG].codes()
    assert weight.scale is not None
    weight.scale.mul_(1.1)
    models[2].release_kernels()
    rows = mismatch.layer_errors(*models, batch)
    assert [row.layer for row in faulty_layers(rows)] == [WRONG]
    assert not faulty_layers(list(before.values()))
    found = {row.layer: row for row in rows}
    assert found.keys() == set(models[0].linears)
    assert found[WRONG].kernel == pytest.approx(0.1, rel=0.05)
    for layer, row in found.items():
        assert row.scheme == before[layer].scheme
        assert row.scheme == 0 if layer == "lm_head" else 0.02 < row.scheme < 0.3
        assert layer == WRONG or row.kernel < 0.01
    scored = scored_learners(investigation(models, batch))
    completions = [completion for group in make_groups() for completion in group.completions]
    assert all([*each.lengths] == [len(c.token_ids) for c in completions] for each in scored)
    (named,) = (f for f in findings(scored, rows, "") if f.level == "warning")
    assert named.text.startswith(f"{WRONG} multiplies otherwise than its codes say")


def test_experts_are_compared_as_layers():
    rows = {
        row.layer: row for row in mismatch.layer_errors(*three("w4a16-g32", moe=True), batch_of())
    }
    experts = [row for layer, row in rows.items() if layer.endswith("mlp.experts")]
    assert len(experts) == 1
    assert all(0.02 < row.scheme < 0.5 and row.kernel < 0.02 for row in experts)


def investigation(models: Three, batch: Batch) -> Investigation:
    learners = {
        name: mismatch.scored(model, batch) for name, model in zip(LEARNERS, models, strict=True)
    }
    layers = mismatch.layer_errors(*models, batch)
    return Investigation(
        batch=batch,
        learners=learners,
        layers=layers,
        multiplies="its own layers",
        pitfalls=[],
    )


def test_the_page_holds_what_was_measured():
    """Scatter, position and probability for each learner, every layer, text as text; no more points
    than fit.
    """
    count = 3 * POINTS
    generator = np.random.default_rng(0)
    sampler = -generator.random(count) * 5
    learners = [
        ScoredLearner(
            name,
            sampler,
            sampler + apart,
            np.full(3, POINTS),
            {"mean_abs": apart, "equal": 0.0, "k3": None},
        )
        for name, apart in (("plain", 0.2), ("<b>aligned", 0.0))
    ]
    layers = [LayerDeviation(f"layer.{n}", 0.1, 1e-4 * (1 + FAULTY * (n == 7))) for n in range(20)]
    page = mismatch_page(
        "model <script>", findings(learners, layers, "kernels & more"), learners, layers
    )
    data = json.loads(page.split('id="data">', 1)[1].split("</script>", 1)[0])
    assert [figure["id"] for figure in data["figures"]] == [
        "probabilities",
        "by-position",
        "by-probability",
    ]
    assert all(len(line["x"]) == POINTS for line in data["figures"][0]["lines"])
    (figure,) = data["layers"]
    assert figure["labels"][7] == "layer.7"
    assert [each["y"][7] for each in figure["lines"]] == [
        0.1,
        6e-4,
    ]
    assert data["measured"] == [["mean_abs", 0.2, 0], ["equal", 0, 0]]
    assert "model &lt;script&gt;" in page
    assert "kernels &amp; more" in page
    assert "model <script>" not in page
    assert "{{" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_words_of_a_page_are_those_recorded():
    """Layers on both sides of what is named; plain learners, of what alignment is worth: 10 and 100
    nats an answer.
    """
    rng = random.Random(4)
    shown = []
    layers = [LayerDeviation(f"l{n}", 0.01 * n, 2e-5 + 1e-6 * n) for n in range(9)]
    for errors in (
        [],
        [(0.1, 1e-4)],
        [(0.1, 1.1e-4)],
        [(0.9, 1.2e-4), (0.1, 1.3e-4), (0.2, 1e-2)],
        [(0, 0)] * 40,
    ):
        rows = layers[: 9 if len(errors) < 9 else 0] + [
            LayerDeviation("odd", *each) for each in errors
        ]
        shown.append(findings([], rows, "kernels"))
    sampler = np.array([-rng.randrange(1, 512) / 64 for _ in range(3010)])
    learners = []
    for number, apart in enumerate((0.0, 1e-3, 0.09, 0.1, 0.9, 1.0, 3.0)):
        measured = {
            "mean_abs": apart,
            "equal": float(number == 0),
            "k3": None,
            "max_abs": 2 * apart,
        }
        learners.append(
            ScoredLearner(
                "plain",
                sampler,
                sampler - apart / 10,
                np.full(3010 // 1005, 1005),
                measured,
            )
        )
    shown.append(findings(learners, layers, "kernels"))
    lines = []
    for number, findings_of_page in enumerate(shown):
        lines.append(f"page {number}")
        for finding in findings_of_page:
            lines += finding_lines(finding)
    assert_expected(__file__, "mismatch-words", lines)


END = 1
VOCABULARY = 40
PROMPT = (5, 6, 7)
LONGEST = 24
KINDS = {"aligned": 0.0, "other kernels": 0.01, "plain": 0.25}
"""Deviation of the sampler's logits from the learner's."""


def healthy(seed: int, kind: str = "other kernels", **config: Any) -> Evidence:
    """Eight groups of eight, sampled from a policy that is the learner's up to noise in its logits;
    rewards 0 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, LONGEST, VOCABULARY, generator=generator) * 3
    logits[..., END] = -2
    noise = torch.randn(logits.shape, generator=generator) * KINDS[kind]
    sampler = (logits + noise).log_softmax(-1)
    drawn = torch.multinomial(sampler.exp().flatten(0, 1), 1, generator=generator).view(64, LONGEST)
    completions = []
    for row in range(64):
        tokens = drawn[row].tolist()
        count = tokens.index(END) + 1 if END in tokens else LONGEST
        logprobs = sampler[row].gather(-1, drawn[row][:, None])[:count, 0]
        reason = "stop" if END in tokens else "length"
        completions.append(
            Completion(tuple(tokens[:count]), tuple(logprobs.tolist()), "", 0, reason)
        )
    rewards = torch.randint(0, 2, (8, 8), generator=generator).float().tolist()
    groups = [
        Group(
            Prompt(str(n), "", (*PROMPT, n + 10)),
            tuple(completions[8 * n : 8 * n + 8]),
            tuple(rewards[n]),
        )
        for n in range(8)
    ]
    batch = make_batch(groups, 0)

    learner = torch.zeros(batch.response_mask.shape)
    logprobs = logits.log_softmax(-1)
    for row, completion in enumerate(completions):
        count = len(completion.token_ids)
        learner[row, len(PROMPT) : len(PROMPT) + count] = logprobs[row].gather(
            -1, drawn[row][:, None]
        )[:count, 0]
    last_bits = torch.randn(learner.shape, generator=generator) * 1e-3
    return Evidence(
        groups=groups,
        batch=batch,
        learner=learner,
        alone=learner[:8] + last_bits[:8],
        packed=learner + last_bits,
        begin_token=None,
        encode=lambda ids: list(ids),
        masters={"w": torch.randn(8, 8, generator=generator) * 0.02},
        config=LearnerConfig.model_validate(config),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_set_ups_have_none(kind: str):
    """100 in all: with the engine's kernels, with others, and a plain learner of a quantized
    sampler.
    """
    for seed in range(34):
        coarse = {
            "master_dtype": "bfloat16",
            "optimizer": {"lr": 5e-5, "rounding": "nearest"},
        }
        assert find_pitfalls(healthy(seed, kind, **coarse)) == [], seed


def with_sampler(evidence: Evidence, change: Callable[[torch.Tensor], torch.Tensor]) -> Evidence:
    batch = evidence.batch
    changed = change(batch.sampler_logprobs) * batch.response_mask
    return dataclasses.replace(evidence, batch=dataclasses.replace(batch, sampler_logprobs=changed))


def with_groups(
    evidence: Evidence, change: Callable[[Group], dict[str, Any]], **others: Any
) -> Evidence:
    groups = [dataclasses.replace(group, **change(group)) for group in evidence.groups]
    return dataclasses.replace(evidence, groups=groups, **others)


def mostly_above(values: torch.Tensor) -> torch.Tensor:
    lowered = torch.arange(values.numel()).view(values.shape) % 10 == 0
    return torch.where(lowered, values - 0.3, values)


COARSE = LearnerConfig.model_validate(
    {"master_dtype": "bfloat16", "optimizer": {"lr": 1e-6, "rounding": "nearest"}}
)
PLANTED: dict[str, Callable[[Evidence], Evidence]] = {
    "ratio mean before any update": lambda e: with_sampler(e, lambda v: v + 0.004),
    "one-sided clipping": lambda e: with_sampler(e, mostly_above),
    "positions, packed against padded": lambda e: dataclasses.replace(
        e, packed=e.learner.roll(1, 0)
    ),
    "log-probs that depend on the batch": lambda e: dataclasses.replace(e, alone=e.alone * 1.02),
    "template round trip": lambda e: dataclasses.replace(e, encode=lambda ids: [9, *ids]),
    "BOS token twice": lambda e: with_groups(
        e, lambda _: {"prompt": Prompt("", "", (2, 2, 5))}, begin_token=2
    ),
    "learning rate below the masters' resolution": lambda e: dataclasses.replace(e, config=COARSE),
    "group deviation": lambda e: with_groups(e, lambda _: {"rewards": (1.0,) * 8}),
}
WITH_OTHERS = ("ratio mean before any update", "one-sided clipping")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pitfall_is_found(name: str):
    """It is named, in the first of its words and with a figure; of those that change nothing else,
    alone.
    """
    for seed in range(5):
        planted = PLANTED[name](healthy(seed, "other kernels"))
        found = find_pitfalls(planted)
        assert name in [pitfall.about for pitfall in found]
        assert all(pitfall.text and pitfall.remedy for pitfall in found)
        if name not in WITH_OTHERS:
            assert len(found) == 1, found


def test_rewards_that_differ_by_rounding_alone():
    evidence = with_groups(
        healthy(0), lambda _: {"rewards": tuple(100 + 1e-5 * n for n in range(8))}
    )
    (pitfall,) = find_pitfalls(evidence)
    assert pitfall.about == "group deviation"
    assert "advantages divide by that" in pitfall.text
    unscaled = dataclasses.replace(
        evidence, config=LearnerConfig.model_validate({"advantage": "dr_grpo"})
    )
    assert find_pitfalls(unscaled) == []


def test_the_ratio_of_the_common_pitfall_is_seen():
    """verl-omni's float32 loss: a mean ratio of 0.99996 with hardly any noise."""
    evidence = with_sampler(healthy(0, "aligned"), lambda values: values - math.log(0.99996))
    (pitfall,) = find_pitfalls(evidence)
    assert "0.99996" in pitfall.text
