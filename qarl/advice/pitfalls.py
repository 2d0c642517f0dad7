"""Known pitfalls of training with one engine and learning with another, looked for in one batch before any update.

Each check takes what was measured, not what a configuration says. Sources: verl-omni's common pitfalls; "Defeating the
trainer-generator precision mismatch in TRL" (Hugging Face, 2026).
Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Nats of a log-ratio that a clip would cut; share of those on one side; tokens that are too few to say."""

COINCIDENCE = -20.0
"""Log-probability of two equal completions, below which they are no coincidence."""

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)


@dataclass(frozen=True)
class Evidence:
    """One batch before any update. groups: that `batch` was made of. learner: log-probs of it, fp32 [B, T-1], its rows
    together; alone: of the first rows, each by itself, [b, T-1]; packed: as `learner`, with sequences packed, None
    where the learner does not. tempered: log-probs of the first rows at a temperature, [b, T-1]. end_tokens: ids that
    end a response. encode: the ids of a prompt's decoded text. tied: the model's `tie_word_embeddings`; own_head:
    whether the checkpoint has an output head other than its embeddings. masters: name → weights."""

    groups: Sequence[Group]
    batch: Batch
    learner: torch.Tensor
    alone: torch.Tensor
    packed: torch.Tensor | None
    tempered: Callable[[float], torch.Tensor]
    end_tokens: frozenset[int]
    begin_token: int | None
    encode: Callable[[Sequence[int]], Sequence[int]]
    tied: bool
    own_head: bool
    masters: Mapping[str, torch.Tensor]
    config: LearnerConfig


def _pitfall(about: str, text: str, remedy: str) -> Finding:
    return Finding("warning", about, text, remedy)


def _difference(evidence: Evidence) -> torch.Tensor:
    batch = evidence.batch
    return (evidence.learner - batch.sampler_logprobs)[batch.response_mask].double()


def _apart(evidence: Evidence, logprobs: torch.Tensor) -> torch.Tensor:
    """|Δ log p| of the learner's, and of other log-probs of all or of its first rows; one value a token."""
    rows = len(logprobs)
    return (logprobs - evidence.learner[:rows])[evidence.batch.response_mask[:rows]].abs()


def _ratio_mean(evidence: Evidence) -> Iterator[Finding]:
    weight = _difference(evidence).exp()
    off = float(weight.mean()) - 1
    error = float(weight.std()) / math.sqrt(len(weight)) if len(weight) > 1 else 0.0
    if abs(off) > max(1e-5, ERRORS * error):
        yield _pitfall(
            "ratio mean before any update",
            f"mean π_learner/π_sampler is {1 + off:.5f}, {abs(off) / max(error, 1e-12):.0f} standard errors from 1",
            "a bias that rounding both ways does not make: compare dtypes of logits, log-softmax and stored values of "
            "sampler and learner",
        )


def _one_sided(evidence: Evidence) -> Iterator[Finding]:
    difference = _difference(evidence)
    outside = difference[difference.abs() > OUTSIDE]
    above = float((outside > 0).double().mean()) if len(outside) else 0.5
    if len(outside) >= FEW and max(above, 1 - above) >= ONE_SIDE:
        side = "above" if above > 0.5 else "below"
        yield _pitfall(
            "one-sided clipping",
            f"{max(above, 1 - above):.0%} of the {len(outside)} tokens whose ratio is off by more than 10 % are {side} "
            "1, before anything was learned",
            "see the ratio's mean and the temperature; a policy's own movement is on both sides",
        )


def _stored_precision(evidence: Evidence) -> Iterator[Finding]:
    values = evidence.batch.sampler_logprobs[evidence.batch.response_mask]
    values = values[values != 0].unique()
    for dtype in (torch.bfloat16, torch.float16):
        if len(values) >= FEW and bool((values.to(dtype).to(values.dtype) == values).all()):
            step = float(torch.finfo(dtype).eps) / 2
            yield _pitfall(
                "stored log-probs' dtype",
                f"all {len(values)} values of the sampler's log-probs are {str(dtype).removeprefix('torch.')} numbers, "
                f"off by up to {step:.1e} of themselves",
                "keep log-probs in float32 from the engine's log-softmax to the loss",
            )
            return


def _temperature(evidence: Evidence) -> Iterator[Finding]:
    rows = len(evidence.alone)
    mask, sampler = evidence.batch.response_mask[:rows], evidence.batch.sampler_logprobs[:rows]

    def apart(logprobs: torch.Tensor) -> float:
        return float((logprobs - sampler)[mask].abs().mean())

    plain = apart(evidence.tempered(1.0))
    distances = {temperature: apart(evidence.tempered(temperature)) for temperature in TEMPERATURES}
    best = min(distances, key=lambda temperature: distances[temperature])
    if plain > APART and distances[best] < 0.2 * plain:
        yield _pitfall(
            "temperature in log-probs",
            f"the sampler's log-probs are those of temperature {best:g}: {distances[best]:.2g} nats a token from the "
            f"learner's, {plain:.2g} at temperature 1",
            "sample at temperature 1, or divide the learner's logits by the sampler's temperature",
        )


def _positions(evidence: Evidence) -> Iterator[Finding]:
    if evidence.packed is None:
        return
    apart = _apart(evidence, evidence.packed)
    if float(apart.mean()) > APART:
        yield _pitfall(
            "positions, packed against padded",
            f"a sequence's log-probs are {float(apart.mean()):.2g} nats a token apart ({float(apart.max()):.2g} at "
            "most) between packed and padded batches",
            "positions have to begin at 0 for every packed sequence, and rotary frequencies not to depend on the "
            "longest; learner.packing false avoids it",
        )


def _company(evidence: Evidence) -> Iterator[Finding]:
    apart = _apart(evidence, evidence.alone)
    if float(apart.mean()) > APART:
        yield _pitfall(
            "log-probs that depend on the batch",
            f"a sequence alone and the same among others are {float(apart.mean()):.2g} nats a token apart "
            f"({float(apart.max()):.2g} at most)",
            "look for padding that is attended to, and for operators over the whole batch",
        )


def _template(evidence: Evidence) -> Iterator[Finding]:
    prompts = [group.prompt.token_ids for group in evidence.groups]
    changed = sum(list(evidence.encode(ids)) != list(ids) for ids in prompts)
    if changed:
        yield _pitfall(
            "template round trip",
            f"{changed} of {len(prompts)} prompts are other tokens when their text is tokenized again",
            "train on the ids that were sampled from, never on text that is tokenized again",
        )
    begin = evidence.begin_token
    doubled = sum(begin is not None and tuple(ids[:2]) == (begin, begin) for ids in prompts)
    if doubled:
        yield _pitfall(
            "begin token twice",
            f"{doubled} of {len(prompts)} prompts begin with the begin token twice",
            "the chat template writes it already: tokenize its text without special tokens",
        )


def _end_tokens(evidence: Evidence) -> Iterator[Finding]:
    completions = [c for group in evidence.groups for c in group.completions]
    learned = evidence.batch.response_mask.sum(-1).tolist()
    wrong = 0
    for completion, count in zip(completions, learned, strict=True):
        ends = sum(token in evidence.end_tokens for token in completion.token_ids)
        wrong += count != len(completion.token_ids) or ends != (completion.finish_reason == "stop")
    if wrong:
        yield _pitfall(
            "end token not counted once",
            f"{wrong} of {len(completions)} responses have an end token too many or too few among the tokens that are "
            "learned",
            "the end token is sampled and learned like any other, once; none follows it, and a truncated response has "
            "none",
        )


def _tied_embeddings(evidence: Evidence) -> Iterator[Finding]:
    if evidence.tied == evidence.own_head:
        why = (
            "the checkpoint has an output head of its own, which tie_word_embeddings true leaves unread"
            if evidence.own_head
            else "the checkpoint has no output head, and tie_word_embeddings is false: the head is made up"
        )
        yield _pitfall("tied embeddings", why, "correct tie_word_embeddings in the model's config.json")


def _seeds(evidence: Evidence) -> Iterator[Finding]:
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for group in evidence.groups:
        for completion in group.completions:
            if sum(completion.logprobs) < COINCIDENCE:
                key = (group.prompt.token_ids, completion.token_ids)
                seen[key] = seen.get(key, 0) + 1
    repeated = sum(count - 1 for count in seen.values())
    if repeated:
        yield _pitfall(
            "seeds shared",
            f"{repeated} completions of one prompt are another's repetition, though each is as unlikely as "
            f"{math.exp(COINCIDENCE):.0e}",
            "every sample of every prompt needs a random stream of its own",
        )


def _resolution(evidence: Evidence) -> Iterator[Finding]:
    optimizer, master = evidence.config.optimizer, evidence.config.master_dtype
    if master == "float32" or optimizer.rounding_of(master) != "nearest":
        return
    step = torch.finfo({"bfloat16": torch.bfloat16, "float16": torch.float16}[master]).eps / 4  # half of one, at least
    lost = total = 0
    for weights in evidence.masters.values():
        lost += int((weights.detach().abs().float() * step > optimizer.lr).sum())
        total += weights.numel()
    if lost > total / 2:
        yield _pitfall(
            "learning rate below the masters' resolution",
            f"an update of {optimizer.lr:g} is rounded away in {lost / total:.0%} of the {master} masters",
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
            f"rewards within {len(small)} of {len(deviations)} groups differ by {fmean(small):.0e} of their size, and "
            "advantages divide by that",
            "round the reward to what it means, or learner.advantage dr_grpo",
        )


CHECKS = (
    _ratio_mean, _one_sided, _stored_precision, _temperature, _positions, _company, _template, _end_tokens,
    _tied_embeddings, _seeds, _resolution, _deviation,
)  # fmt: skip


def find_pitfalls(evidence: Evidence) -> list[Finding]:
    """Warnings of those that are there; none of a healthy set-up."""
    return [pitfall for check in CHECKS for pitfall in check(evidence)]
