"""Completions → padded tensors, and how a batch is cut into mini- and micro-batches.

Axes: B sequences, T tokens of prompt, response and padding. What belongs to a predicted token is [B, T-1]: position t
is token t + 1's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from learner.objectives.advantages import group_advantages
from rollout.types import Group


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right.

    tokens: int64 [B, T], prompt then response then padding. length: int64 [B], prompt + response.
    response_mask: bool [B, T-1], True where tokens[:, 1:] is a token to learn from: the response's.
    sampler_logprobs: fp32 [B, T-1], the sampler's, and advantages: fp32 [B, T-1]; both zero outside the mask.
    group: int64 [B], which prompt each sequence answers. experts: int32 [B, T, L, K], those the sampler routed each
    token to in each decoder layer, -1 where it did not tell; None where routing is not replayed. ended: bool [B], whose
    last token is the end token, none of them where it was cut off; None where that is not known. versions_behind: int64
    [B, T-1], weight versions published since each token was sampled, 0 outside the mask; None where all are of the
    present weights.
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

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def rows(self, index: torch.Tensor) -> "Batch":
        """The sequences at `index` (int64 [n]), with padding no longer than their longest."""
        longest = int(self.length[index].max())
        cut = dict.fromkeys(("response_mask", "sampler_logprobs", "advantages", "versions_behind"), longest - 1)
        cut |= {"tokens": longest, "experts": longest}
        picked = {name: tensor[index] for name, tensor in self._tensors().items()}
        return Batch(**{k: v[:, : cut[k]] if k in cut else v for k, v in picked.items()})


def make_batch(groups: Sequence[Group], pad_token: int, advantage: str = "grpo", version: int | None = None) -> Batch:
    """Every completion of every group as one row, in order. advantage: estimator, see `learner.objectives.advantages`;
    all tokens of a response have its advantage. version: of the weights that learn; None: those that sampled."""
    of_sequences = _advantages([g.rewards for g in groups], advantage)
    pairs = [(i, g.prompt.token_ids, c) for i, g in enumerate(groups) for c in g.completions]
    longest = max(len(p) + len(c.token_ids) for _, p, c in pairs)
    tokens = torch.full((len(pairs), longest), pad_token, dtype=torch.int64)
    response_mask = torch.zeros((len(pairs), longest - 1), dtype=torch.bool)
    sampler = torch.zeros((len(pairs), longest - 1), dtype=torch.float32)
    behind = torch.zeros((len(pairs), longest - 1), dtype=torch.int64)
    for row, (_, prompt, completion) in enumerate(pairs):
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        tokens[row, :end] = torch.tensor([*prompt, *completion.token_ids])
        response_mask[row, start - 1 : end - 1] = True
        sampler[row, start - 1 : end - 1] = torch.tensor(completion.logprobs)
        if version is not None:
            behind[row, start - 1 : end - 1] = version - torch.tensor(completion.versions)
    advantages = torch.where(response_mask, of_sequences[:, None], 0.0)
    length = torch.tensor([len(p) + len(c.token_ids) for _, p, c in pairs])
    experts = _stack_experts([c.experts for _, _, c in pairs], longest)
    return Batch(
        tokens=tokens, length=length, response_mask=response_mask, sampler_logprobs=sampler, advantages=advantages,
        group=torch.tensor([i for i, _, _ in pairs]), experts=experts,
        ended=torch.tensor([c.finish_reason == "stop" for _, _, c in pairs]),
        versions_behind=None if version is None else behind,
    )  # fmt: skip


def _advantages(rewards: Sequence[Sequence[float]], estimator: str) -> torch.Tensor:
    """fp32 [B]; groups of one size at once, since sizes differ only where a reward had nothing to say."""
    if len({len(group) for group in rewards}) == 1:
        return group_advantages(torch.tensor(rewards, dtype=torch.float32), estimator).flatten()
    alone = [group_advantages(torch.tensor([group], dtype=torch.float32), estimator) for group in rewards]
    return torch.cat(alone, dim=1).flatten()


def _stack_experts(chosen: Sequence[Any], longest: int) -> torch.Tensor | None:
    """`Completion.experts` of every row as int32 [B, T, L, K]; the last token of each was never routed."""
    if any(experts is None for experts in chosen):
        return None
    stacked = torch.full((len(chosen), longest, *chosen[0].shape[1:]), -1, dtype=torch.int32)
    for row, experts in enumerate(chosen):
        stacked[row, : len(experts)] = torch.from_numpy(experts.astype("int32"))
    return stacked


def mini_batches(batch: Batch, count: int, seed: int) -> list[torch.Tensor]:
    """Row indices of `count` mini-batches: whole groups, shuffled by `seed`, sizes as equal as possible."""
    groups = int(batch.group.max()) + 1
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    return [torch.isin(batch.group, part).nonzero().flatten() for part in order.tensor_split(count) if len(part)]


def micro_batches(batch: Batch, index: torch.Tensor, max_tokens: int, packed: bool = False) -> Iterator[torch.Tensor]:
    """Cut `index` into runs of similar length, longest first, whose size stays within `max_tokens`.

    packed: count the sequences' own tokens; else what they take when padded to the longest of the run. A sequence that
    is longer than `max_tokens` is a run of its own.
    """
    by_length = index[torch.argsort(batch.length[index], stable=True, descending=True)]
    lengths: list[int] = batch.length[by_length].tolist()
    start = 0
    while start < len(by_length):
        rows, tokens = 1, lengths[start]
        while start + rows < len(by_length):
            tokens += lengths[start + rows] if packed else lengths[start]
            if tokens > max_tokens:
                break
            rows += 1
        yield by_length[start : start + rows]
        start += rows
