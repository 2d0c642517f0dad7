"""Pitfalls: each planted in a healthy set-up is found by its name, and healthy ones of every kind give none. Policies
are random logits, so what engines and tokenizers do of themselves is not seen here."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qarl.advice.mismatch import has_own_head
from qarl.advice.pitfalls import Evidence, find_pitfalls
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import make_batch
from qarl.rollout.types import Completion, Group, Prompt

END, VOCABULARY, PROMPT, LONGEST = 1, 40, (5, 6, 7), 24
KINDS = {"aligned": 0.0, "other kernels": 0.01, "plain": 0.25}
"""Deviation of the sampler's logits from the learner's."""


def healthy(seed: int, kind: str = "other kernels", **config: Any) -> Evidence:
    """Eight groups of eight, sampled from a policy that is the learner's up to noise in its logits; rewards 0 and 1."""
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
        completions.append(Completion(tuple(tokens[:count]), tuple(logprobs.tolist()), "", 0, reason))
    rewards = torch.randint(0, 2, (8, 8), generator=generator).float().tolist()
    groups = [
        Group(Prompt(str(n), "", (*PROMPT, n + 10)), tuple(completions[8 * n : 8 * n + 8]), tuple(rewards[n]))
        for n in range(8)
    ]
    batch = make_batch(groups, 0)

    def logprobs_at(temperature: float) -> torch.Tensor:
        found = torch.zeros(batch.response_mask.shape)
        scaled = (logits / temperature).log_softmax(-1)
        for row, completion in enumerate(completions):
            count = len(completion.token_ids)
            found[row, len(PROMPT) : len(PROMPT) + count] = scaled[row].gather(-1, drawn[row][:, None])[:count, 0]
        return found

    learner = logprobs_at(1.0)
    last_bits = torch.randn(learner.shape, generator=generator) * 1e-3
    return Evidence(
        groups=groups, batch=batch, learner=learner, alone=learner[:8] + last_bits[:8], packed=learner + last_bits,
        tempered=lambda temperature: logprobs_at(temperature)[:8], end_tokens=frozenset([END]), begin_token=None,
        encode=lambda ids: list(ids), tied=bool(seed % 2), own_head=not seed % 2,
        masters={"w": torch.randn(8, 8, generator=generator) * 0.02}, config=LearnerConfig.model_validate(config),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_set_ups_have_none(kind: str):
    """100 in all: with the engine's kernels, with others, and a plain learner of a quantized sampler."""
    for seed in range(34):
        assert find_pitfalls(healthy(seed, kind)) == [], seed


def with_sampler(evidence: Evidence, change: Callable[[torch.Tensor], torch.Tensor]) -> Evidence:
    batch = evidence.batch
    changed = change(batch.sampler_logprobs) * batch.response_mask
    return dataclasses.replace(evidence, batch=dataclasses.replace(batch, sampler_logprobs=changed))


def with_groups(evidence: Evidence, change: Callable[[Group], dict[str, Any]], **others: Any) -> Evidence:
    groups = [dataclasses.replace(group, **change(group)) for group in evidence.groups]
    return dataclasses.replace(evidence, groups=groups, **others)


def ended_twice(group: Group) -> dict[str, Any]:
    return {"completions": tuple(dataclasses.replace(c, token_ids=(*c.token_ids, END)) for c in group.completions)}


def mostly_above(values: torch.Tensor) -> torch.Tensor:
    lowered = torch.arange(values.numel()).view(values.shape) % 10 == 0
    return torch.where(lowered, values - 0.3, values)


COARSE = LearnerConfig.model_validate(
    {"master_dtype": "bfloat16", "optimizer": {"lr": 1e-6, "rounding": "nearest"}}
)  # fmt: skip
PLANTED: dict[str, Callable[[Evidence], Evidence]] = {
    "ratio mean before any update": lambda e: with_sampler(e, lambda v: v + 0.004),
    "one-sided clipping": lambda e: with_sampler(e, mostly_above),
    "stored log-probs' dtype": lambda e: with_sampler(e, lambda v: v.bfloat16().float()),
    "temperature in log-probs": lambda e: with_sampler(e, lambda v: torch.cat([e.tempered(0.7), v[8:]])),
    "positions, packed against padded": lambda e: dataclasses.replace(e, packed=e.learner.roll(1, 0)),
    "log-probs that depend on the batch": lambda e: dataclasses.replace(e, alone=e.alone * 1.02),
    "template round trip": lambda e: dataclasses.replace(e, encode=lambda ids: [9, *ids]),
    "begin token twice": lambda e: with_groups(e, lambda _: {"prompt": Prompt("", "", (2, 2, 5))}, begin_token=2),
    "end token not counted once": lambda e: with_groups(e, ended_twice),
    "tied embeddings": lambda e: dataclasses.replace(e, tied=not e.tied),
    "seeds shared": lambda e: dataclasses.replace(e, groups=[e.groups[0], *e.groups[:-1]]),
    "learning rate below the masters' resolution": lambda e: dataclasses.replace(e, config=COARSE),
    "group deviation": lambda e: with_groups(e, lambda _: {"rewards": (1.0,) * 8}),
}
WITH_OTHERS = ("ratio mean before any update", "one-sided clipping", "temperature in log-probs", "seeds shared")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pitfall_is_found(name: str):
    """By its name, in the first of its words and with a figure; of those that change nothing else, alone."""
    for seed in range(5):
        planted = PLANTED[name](healthy(seed, "other kernels"))
        found = find_pitfalls(planted)
        assert name in [pitfall.about for pitfall in found]
        assert all(pitfall.text and pitfall.remedy for pitfall in found)
        if name not in WITH_OTHERS:
            assert len(found) == 1, found


def test_rewards_that_differ_by_rounding_alone():
    evidence = with_groups(healthy(0), lambda _: {"rewards": tuple(100 + 1e-5 * n for n in range(8))})
    (pitfall,) = find_pitfalls(evidence)
    assert pitfall.about == "group deviation" and "advantages divide by that" in pitfall.text
    unscaled = dataclasses.replace(evidence, config=LearnerConfig.model_validate({"advantage": "dr_grpo"}))
    assert find_pitfalls(unscaled) == []


def test_the_ratio_of_the_common_pitfall_is_seen():
    """verl-omni's float32 loss: a mean ratio of 0.99996 with hardly any noise."""
    evidence = with_sampler(healthy(0, "aligned"), lambda values: values - math.log(0.99996))
    (pitfall,) = find_pitfalls(evidence)
    assert "0.99996" in pitfall.text


@pytest.mark.parametrize(("head", "own"), [(None, False), ("equal", False), ("other", True)])
def test_an_output_head_of_its_own(tmp_path: Path, head: str | None, own: bool):
    embedding = torch.arange(6.0).view(3, 2)
    tensors = {"model.embed_tokens.weight": embedding}
    if head:
        tensors["lm_head.weight"] = embedding + (head == "other")
    save_file(tensors, tmp_path / "model.safetensors")
    assert has_own_head(tmp_path) == own
