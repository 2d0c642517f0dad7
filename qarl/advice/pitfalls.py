"""Known pitfalls of training with one engine and learning with another, looked for in one batch
before any update.

Each check takes what was measured, not what a configuration says. Sources: verl-omni's common
pitfalls; "Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026). Axes: B
sequences, T tokens, of which T-1 are predicted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev

import torch

from qarl.advice.finding import Finding
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch
from qarl.rollout.types import Group

APART = 0.01
"""Nats, mean: two computations of one policy that are further apart are two policies."""

ERRORS = 5.0
"""Standard errors, beyond which a mean is not what it should be."""

OUTSIDE, ONE_SIDE, FEW = 0.1, 0.95, 20
"""Nats of a log-ratio that a clip would cut; share of those on one side; tokens that are too few to
say.
"""


@dataclass(frozen=True)
class Evidence:
    """One batch before any update. groups: that `batch` was made of. learner: log-probs of it, fp32
    [B, T-1], its rows together; alone: of the first rows, each by itself, [b, T-1]; packed: as
    `learner`, with sequences packed, None where the learner does not. encode: the ids of a prompt's
    decoded text. masters: name → weights.
    """

    groups: Sequence[Group]
    batch: Batch
    learner: torch.Tensor
    alone: torch.Tensor
    packed: torch.Tensor | None
    begin_token: int | None
    encode: Callable[[Sequence[int]], Sequence[int]]
    masters: Mapping[str, torch.Tensor]
    config: LearnerConfig


_pitfall = partial(Finding, "warning")


def _difference(evidence: Evidence) -> torch.Tensor:
    batch = evidence.batch
    return (evidence.learner - batch.sampler_logprobs)[batch.response_mask].double()


def _apart(evidence: Evidence, logprobs: torch.Tensor) -> torch.Tensor:
    """|Δ log p| of the learner's, and of other log-probs of all or of its first rows; one value a
    token.
    """
    rows = len(logprobs)
    return (logprobs - evidence.learner[:rows])[evidence.batch.response_mask[:rows]].abs()


def _ratio_mean(evidence: Evidence) -> Iterator[Finding]:
    weight = _difference(evidence).exp()
    off = float(weight.mean()) - 1
    error = float(weight.std()) / math.sqrt(len(weight)) if len(weight) > 1 else 0.0
    if abs(off) > max(1e-5, ERRORS * error):
        yield _pitfall(
            "ratio mean before any update",
            f"mean π_learner/π_sampler is {1 + off:.5f}, {abs(off) / max(error, 1e-12):.0f}"
            " standard errors from 1",
            "a bias that rounding both ways does not make: compare temperatures, and dtypes of"
            " logits, log-softmax and stored values of sampler and learner",
        )


def _one_sided(evidence: Evidence) -> Iterator[Finding]:
    difference = _difference(evidence)
    outside = difference[difference.abs() > OUTSIDE]
    above = float((outside > 0).double().mean()) if len(outside) else 0.5
    if len(outside) >= FEW and max(above, 1 - above) >= ONE_SIDE:
        side = "above" if above > 0.5 else "below"
        yield _pitfall(
            "one-sided clipping",
            f"{max(above, 1 - above):.0%} of the {len(outside)} tokens whose ratio is off by more"
            f" than 10 % are {side} 1, before anything was learned",
            "see the ratio's mean; a policy's own movement is on both sides",
        )


def _positions(evidence: Evidence) -> Iterator[Finding]:
    if evidence.packed is None:
        return
    apart = _apart(evidence, evidence.packed)
    if float(apart.mean()) > APART:
        yield _pitfall(
            "positions, packed against padded",
            f"a sequence's log-probs are {float(apart.mean()):.2g} nats a token apart"
            f" ({float(apart.max()):.2g} at most) between packed and padded batches",
            "positions have to begin at 0 for every packed sequence, and rotary frequencies not to"
            " depend on the longest; learner.packing false avoids it",
        )


def _company(evidence: Evidence) -> Iterator[Finding]:
    apart = _apart(evidence, evidence.alone)
    if float(apart.mean()) > APART:
        yield _pitfall(
            "log-probs that depend on the batch",
            f"a sequence alone and the same among others are {float(apart.mean()):.2g} nats a token"
            f" apart ({float(apart.max()):.2g} at most)",
            "look for padding that is attended to, and for operators over the whole batch",
        )


def _template(evidence: Evidence) -> Iterator[Finding]:
    prompts = [group.prompt.token_ids for group in evidence.groups]
    changed = sum(list(evidence.encode(ids)) != list(ids) for ids in prompts)
    if changed:
        yield _pitfall(
            "template round trip",
            f"{changed} of {len(prompts)} prompts are other tokens when their text is tokenized"
            " again",
            "train on the ids that were sampled from, never on text that is tokenized again",
        )
    begin = evidence.begin_token
    doubled = sum(begin is not None and tuple(ids[:2]) == (begin, begin) for ids in prompts)
    if doubled:
        yield _pitfall(
            "BOS token twice",
            f"{doubled} of {len(prompts)} prompts begin with the BOS token twice",
            "the chat template writes it already: tokenize its text without special tokens",
        )


def _resolution(evidence: Evidence) -> Iterator[Finding]:
    optimizer, master = evidence.config.optimizer, evidence.config.master_dtype
    if master == "float32" or optimizer.rounding_of(master) != "nearest":
        return
    # half of one, at least
    step = torch.finfo({"bfloat16": torch.bfloat16, "float16": torch.float16}[master]).eps / 4
    lost = total = 0
    for weights in evidence.masters.values():
        lost += int((weights.detach().abs().float() * step > optimizer.lr).sum())
        total += weights.numel()
    if lost > total / 2:
        yield _pitfall(
            "learning rate below the masters' resolution",
            f"an update of {optimizer.lr:g} is rounded away in {lost / total:.0%} of the {master}"
            " masters",
            "learner.optimizer.rounding stochastic, or learner.master_dtype float32",
        )


def _deviation(evidence: Evidence) -> Iterator[Finding]:
    deviations = [pstdev(group.rewards) for group in evidence.groups if len(group.rewards) > 1]
    sizes = [max(map(abs, group.rewards)) for group in evidence.groups if len(group.rewards) > 1]
    idle = sum(deviation == 0 for deviation in deviations)
    if deviations and idle > 0.9 * len(deviations):
        yield _pitfall(
            "group deviation",
            f"in {idle} of {len(deviations)} groups all rewards are equal, so they teach nothing",
            "an easier or a harder task, more samples a prompt, or rollout.dynamic_sampling",
        )
    small = [d / size for d, size in zip(deviations, sizes, strict=True) if d and d < 1e-4 * size]
    if evidence.config.advantage == "grpo" and len(small) > 0.5 * len(deviations):
        yield _pitfall(
            "group deviation",
            f"rewards within {len(small)} of {len(deviations)} groups differ by {fmean(small):.0e}"
            " of their size, and advantages divide by that",
            "round the reward to what it means, or learner.advantage dr_grpo",
        )


CHECKS = (
    _ratio_mean,
    _one_sided,
    _positions,
    _company,
    _template,
    _resolution,
    _deviation,
)


def find_pitfalls(evidence: Evidence) -> list[Finding]:
    """Warnings of those that are there; none of a healthy set-up."""
    return [pitfall for check in CHECKS for pitfall in check(evidence)]
