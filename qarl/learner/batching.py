"""Completions → padded tensors, and how a batch is cut into mini- and micro-batches.

Axes: B sequences, T tokens of prompt, response and padding. What belongs to a predicted token is
[B, T-1]: position t is token t + 1's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import torch

from qarl.configs.errors import PolicyError
from qarl.learner.objectives.advantages import group_advantages
from qarl.quant.graph.packing import Packed, pack
from qarl.rollout.types import Group


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right.

    tokens: int64 [B, T], prompt then response then padding. length: int64 [B], prompt + response.
    response_mask: bool [B, T-1], True where tokens[:, 1:] is a token to learn from: the response's,
    but for what an environment wrote between the turns of a conversation. sampler_logprobs: fp32
    [B, T-1], the sampler's, and advantages: fp32 [B, T-1]; both zero outside the mask. group: int64
    [B], which prompt each sequence answers. experts: int32 [B, T, L, K], those the sampler routed
    each token to in each decoder layer, -1 where it did not tell; None where routing is not
    replayed. ended: bool [B], whose last token is the end token, none of them where it was cut off;
    None where that is not known. versions_behind: int64 [B, T-1], weight versions published since
    each token was sampled, 0 outside the mask; None where all are current.
    """

    tokens: torch.Tensor
    length: torch.Tensor
    response_mask: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    group: torch.Tensor
    experts: torch.Tensor | None = None
    ended: torch.Tensor | None = None
    versions_behind: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return Batch(**{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def real(self) -> torch.Tensor:
        """Which of `tokens` are no padding, bool [B, T]."""
        return torch.arange(self.tokens.shape[1])[None] < self.length.cpu()[:, None]

    def prompt_length(self) -> torch.Tensor:
        """Tokens before the first to learn from, int64 [B]; 0 where there is none."""
        return torch.where(self.response_mask.any(-1), self.response_mask.int().argmax(-1) + 1, 0)

    def packed(self, share_prompts: bool = False) -> Packed:
        """All sequences in one row. share_prompts: those of a group have their prompt once, in the
        first of them.
        """
        nothing, number = (
            torch.zeros_like(self.length),
            torch.arange(len(self.length), device=self.length.device),
        )
        if not share_prompts:
            return pack(self.length, self.tokens.shape[1], nothing, number)
        groups, of_row = self.group.unique(return_inverse=True)
        leader = torch.full_like(groups, len(number)).scatter_reduce(0, of_row, number, "amin")[
            of_row
        ]
        prompt = self.prompt_length()
        differs = self.tokens != self.tokens[leader]
        if self.experts is not None:
            differs |= (self.experts != self.experts[leader]).flatten(2).any(-1)
        in_prompt = torch.arange(self.tokens.shape[1], device=self.length.device) < prompt[:, None]
        shares = (
            (leader != number) & ~(differs & in_prompt).any(-1) & (prompt <= self.length[leader])
        )
        return pack(
            self.length,
            self.tokens.shape[1],
            torch.where(shares, prompt, nothing),
            leader,
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def rows(self, index: torch.Tensor) -> "Batch":
        """The sequences at `index` (int64 [n]), with padding no longer than their longest."""
        longest = int(self.length[index].max())
        cut = dict.fromkeys(
            ("response_mask", "sampler_logprobs", "advantages", "versions_behind"),
            longest - 1,
        )
        cut |= {"tokens": longest, "experts": longest}
        picked = {name: tensor[index] for name, tensor in self._tensors().items()}
        return Batch(**{k: v[:, : cut[k]] if k in cut else v for k, v in picked.items()})


def make_batch(
    groups: Sequence[Group],
    pad_token: int = 0,
    advantage: str = "grpo",
    version: int | None = None,
) -> Batch:
    """Every completion of every group as one row, in order. advantage: estimator, see
    `learner.objectives.advantages`; all tokens of a response have its advantage. version: of the
    weights that learn; None: those that sampled. Raises `PolicyError` for rewards that are not one
    finite number a completion, log-probs not one a token, and no rows.
    """
    for number, group in enumerate(groups):
        answers, rewards = group.completions, group.rewards
        if len(rewards) != len(answers) or not all(
            isinstance(r, Real) and isfinite(r) for r in rewards
        ):
            raise PolicyError(
                f"group {number}: rewards {rewards} must be a finite number for each of"
                f" {len(answers)}"
            )
        if any(len(answer.logprobs) != len(answer.token_ids) for answer in answers):
            raise PolicyError(
                f"group {number}: a completion must have a log-prob for each of its tokens"
            )
    if not any(group.completions for group in groups):
        raise PolicyError("make_batch: no group has a completion; sample some, or skip the step")
    of_sequences = _advantages([g.rewards for g in groups], advantage)
    pairs = [(i, g.prompt.token_ids, c) for i, g in enumerate(groups) for c in g.completions]
    length = torch.tensor([len(p) + len(c.token_ids) for _, p, c in pairs])
    longest = int(length.max())
    tokens = torch.full((len(pairs), longest), pad_token, dtype=torch.int64)
    response_mask = torch.zeros((len(pairs), longest - 1), dtype=torch.bool)
    sampler = torch.zeros((len(pairs), longest - 1), dtype=torch.float32)
    behind = torch.zeros((len(pairs), longest - 1), dtype=torch.int64)
    for row, (_, prompt, completion) in enumerate(pairs):
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        tokens[row, :end] = torch.tensor([*prompt, *completion.token_ids])
        response_mask[row, start - 1 : end - 1] = torch.tensor(completion.sampled, dtype=torch.bool)
        sampler[row, start - 1 : end - 1] = torch.tensor(completion.logprobs)
        if version is not None:
            behind[row, start - 1 : end - 1] = version - torch.tensor(completion.versions)
            behind[row] *= response_mask[row]
    advantages = torch.where(response_mask, of_sequences[:, None], 0.0)
    experts = _stack_experts([c.experts for _, _, c in pairs], longest)
    return Batch(
        tokens=tokens,
        length=length,
        response_mask=response_mask,
        sampler_logprobs=sampler,
        advantages=advantages,
        group=torch.tensor([i for i, _, _ in pairs]),
        experts=experts,
        ended=torch.tensor([c.finish_reason == "stop" for _, _, c in pairs]),
        versions_behind=None if version is None else behind,
    )


def _advantages(rewards: Sequence[Sequence[float]], estimator: str) -> torch.Tensor:
    """fp32 [B]; groups of one size at once, since sizes differ only where a reward had nothing to
    say.
    """
    if len({len(group) for group in rewards}) == 1:
        return group_advantages(torch.tensor(rewards, dtype=torch.float32), estimator).flatten()
    alone = [
        group_advantages(torch.tensor([group], dtype=torch.float32), estimator) for group in rewards
    ]
    return torch.cat(alone, dim=1).flatten()


def _stack_experts(chosen: Sequence[Any], longest: int) -> torch.Tensor | None:
    """`Completion.experts` of every row as int32 [B, T, L, K]; the last token of each was never
    routed.
    """
    if any(experts is None for experts in chosen):
        return None
    stacked = torch.full((len(chosen), longest, *chosen[0].shape[1:]), -1, dtype=torch.int32)
    for row, experts in enumerate(chosen):
        stacked[row, : len(experts)] = torch.from_numpy(experts.astype("int32"))
    return stacked


def mini_batches(batch: Batch, count: int, seed: int) -> list[torch.Tensor]:
    """Row indices of `count` mini-batches: whole groups, shuffled by `seed`, sizes as equal as
    possible.
    """
    groups = int(batch.group.max()) + 1
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed)).to(
        batch.group.device
    )
    return [
        torch.isin(batch.group, part).nonzero().flatten()
        for part in order.tensor_split(count)
        if len(part)
    ]


def micro_batches(
    batch: Batch,
    index: torch.Tensor,
    max_tokens: int,
    packed: bool = False,
    share_prompts: bool = False,
) -> Iterator[torch.Tensor]:
    """Cut `index` into runs of similar length, longest first, whose size stays within `max_tokens`.

    packed: count the sequences' own tokens; else what they take when padded to the longest of the
    run. share_prompts: count a group's prompt once; groups stay together, and of each the sequence
    that brings the prompt comes before all that do not. A sequence that is longer than `max_tokens`
    is a run of its own.
    """
    length, group, prompt = (t.tolist() for t in (batch.length, batch.group, batch.prompt_length()))
    rows: list[int] = sorted(index.tolist(), key=lambda row: -length[row])
    if share_prompts:
        longest = {group[row]: length[row] for row in reversed(rows)}
        rows.sort(key=lambda row: (-longest[group[row]], group[row]))
    leaders: list[int] = []
    others: list[int] = []
    size = 0
    for row in rows:
        shares = share_prompts and bool(leaders) and group[row] == group[leaders[-1]]
        size += (
            length[row] - prompt[row] * shares if packed else length[leaders[0] if leaders else row]
        )
        if size > max_tokens and leaders:
            yield _run(leaders, others, prompt, length)
            leaders, others, size, shares = [], [], length[row], False
        (others if shares else leaders).append(row)
    if leaders:
        yield _run(leaders, others, prompt, length)


def _run(
    leaders: list[int], others: list[int], prompt: list[int], length: list[int]
) -> torch.Tensor:
    """int64 [n]. Those that see equally many tokens, and bring equally many, are multiplied at once
    side by side.
    """
    return torch.tensor(leaders + sorted(others, key=lambda row: (-prompt[row], -length[row])))
