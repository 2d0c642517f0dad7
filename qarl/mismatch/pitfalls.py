"""Checks for known pitfalls of sampling with one engine and learning with another.

They look at one batch before any update, and read measurements instead of what the configuration
claims. Sources: verl-omni's common pitfalls;
"Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026).

Axes: B sequences, T tokens, of which T-1 are predicted; b of the B sequences.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch
from qarl.report.finding import Finding
from qarl.rollout.types import Group

APART = 0.01
"""Mean |Δ log p|, in nats a token, above which two computations of a policy disagree."""

ERRORS = 5.0
"""Standard errors by which a mean has to differ from its expected value."""

OUTSIDE = 0.1
"""|log ratio|, in nats, of a token that a clip would cut."""

ONE_SIDE = 0.95
"""Fraction of such tokens on one side that is suspicious."""

FEW = 20
"""Smallest number of such tokens that is judged."""


@dataclass(frozen=True)
class Evidence:
    """Measurements of one batch before any update."""

    groups: Sequence[Group]
    """Groups that the batch was made of."""

    batch: Batch
    """The batch."""

    learner: torch.Tensor
    """The learner's log-probs of all rows together, fp32 [B, T-1]."""

    alone: torch.Tensor
    """The learner's log-probs of the first rows, each in a batch of its own, fp32 [b, T-1]."""

    packed: torch.Tensor | None
    """The learner's log-probs with packed sequences, fp32 [B, T-1]; None if it does not pack."""

    begin_token: int | None
    """Id of the BOS token; None if the tokenizer has none."""

    encode: Callable[[Sequence[int]], Sequence[int]]
    """Function that decodes a prompt's ids and encodes the text again."""

    masters: Mapping[str, torch.Tensor]
    """Name → weights."""

    config: LearnerConfig
    """The learner's configuration."""


_pitfall = partial(Finding, "warning")


def _log_ratios(evidence: Evidence) -> torch.Tensor:
    """Return log π_learner - log π_sampler of all response tokens, fp64, one value a token."""
    batch = evidence.batch
    return (evidence.learner - batch.sampler_logprobs)[batch.response_mask].double()


def _differences(evidence: Evidence, logprobs: torch.Tensor) -> torch.Tensor:
    """Return |Δ log p| between the learner's log-probs and others, one value a token.

    logprobs: of all rows or of the first rows, [b, T-1].
    """
    rows = len(logprobs)
    return (logprobs - evidence.learner[:rows])[evidence.batch.response_mask[:rows]].abs()


def _ratio_mean(evidence: Evidence) -> Iterator[Finding]:
    """The expectation of π_learner/π_sampler under the sampler is 1."""
    ratio = _log_ratios(evidence).exp()
    bias = float(ratio.mean()) - 1
    error = 0.0
    if len(ratio) > 1:
        error = float(ratio.std()) / math.sqrt(len(ratio))
    if abs(bias) > max(1e-5, ERRORS * error):
        errors = abs(bias) / max(error, 1e-12)
        yield _pitfall(
            "ratio mean before any update",
            f"mean π_learner/π_sampler is {1 + bias:.5f}, {errors:.0f} standard errors from 1",
            "a bias that rounding both ways does not make: compare temperatures, and dtypes of"
            " logits, log-softmax and stored values of sampler and learner",
        )


def _one_sided(evidence: Evidence) -> Iterator[Finding]:
    """Rounding moves ratios to both sides of 1."""
    log_ratios = _log_ratios(evidence)
    outside = log_ratios[log_ratios.abs() > OUTSIDE]
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
    """Packing must not change a sequence's log-probs."""
    if evidence.packed is None:
        return
    differences = _differences(evidence, evidence.packed)
    mean = float(differences.mean())
    if mean > APART:
        yield _pitfall(
            "positions, packed against padded",
            f"a sequence's log-probs are {mean:.2g} nats a token apart"
            f" ({float(differences.max()):.2g} at most) between packed and padded batches",
            "positions have to begin at 0 for every packed sequence, and rotary frequencies not to"
            " depend on the longest; learner.packing false avoids it",
        )


def _batch_dependence(evidence: Evidence) -> Iterator[Finding]:
    """The other rows of a batch must not change a sequence's log-probs."""
    differences = _differences(evidence, evidence.alone)
    mean = float(differences.mean())
    if mean > APART:
        yield _pitfall(
            "log-probs that depend on the batch",
            f"a sequence alone and the same among others are {mean:.2g} nats a token"
            f" apart ({float(differences.max()):.2g} at most)",
            "look for padding that is attended to, and for operators over the whole batch",
        )


def _template(evidence: Evidence) -> Iterator[Finding]:
    """A prompt's text must encode to the ids that were sampled from, with one BOS token."""
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
    twice = (begin, begin)
    doubled = sum(begin is not None and tuple(ids[:2]) == twice for ids in prompts)
    if doubled:
        yield _pitfall(
            "BOS token twice",
            f"{doubled} of {len(prompts)} prompts begin with the BOS token twice",
            "the chat template writes it already: tokenize its text without special tokens",
        )


def _resolution(evidence: Evidence) -> Iterator[Finding]:
    """An update must be large enough to change a 16-bit master that is rounded to the nearest."""
    optimizer = evidence.config.optimizer
    master = evidence.config.master_dtype
    if master == "float32" or optimizer.rounding_of(master) != "nearest":
        return
    # A weight w changes if the update exceeds half of its spacing, which is eps · |w| at most and
    # eps / 2 · |w| at least. Updates of AdamW, and of Muon here, have about the size of the
    # learning rate.
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[master]
    half_spacing = torch.finfo(dtype).eps / 4
    lost = total = 0
    for weights in evidence.masters.values():
        smallest = weights.detach().abs().float() * half_spacing
        lost += int((smallest > optimizer.lr).sum())
        total += weights.numel()
    if lost > total / 2:
        yield _pitfall(
            "learning rate below the masters' resolution",
            f"an update of {optimizer.lr:g} is rounded away in {lost / total:.0%} of the {master}"
            " masters",
            "learner.optimizer.rounding stochastic, or learner.master_dtype float32",
        )


def _deviation(evidence: Evidence) -> Iterator[Finding]:
    """Rewards within a group must differ, by more than noise."""
    several = [group.rewards for group in evidence.groups if len(group.rewards) > 1]
    deviations = [pstdev(rewards) for rewards in several]
    sizes = [max(map(abs, rewards)) for rewards in several]
    idle = sum(deviation == 0 for deviation in deviations)
    if deviations and idle > 0.9 * len(deviations):
        yield _pitfall(
            "group deviation",
            f"in {idle} of {len(deviations)} groups all rewards are equal, so they teach nothing",
            "an easier or a harder task, more samples a prompt, or rollout.dynamic_sampling",
        )
    pairs = zip(deviations, sizes, strict=True)
    small = [deviation / size for deviation, size in pairs if 0 < deviation < 1e-4 * size]
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
    _batch_dependence,
    _template,
    _resolution,
    _deviation,
)


def find_pitfalls(evidence: Evidence) -> list[Finding]:
    """Return a warning for each pitfall that the evidence shows; none for a healthy set-up."""
    return [pitfall for check in CHECKS for pitfall in check(evidence)]
