"""Padded tensors from completions, and how a batch is cut into mini- and micro-batches.

Axes: B sequences, T tokens of prompt, response and padding. A tensor of predicted tokens is
[B, T-1]: its position t belongs to token t + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import torch

from qarl.configs.errors import PolicyError
from qarl.learner.objectives.advantages import group_advantages
from qarl.quant.graph.packing import Packed, PictureRows, pack, prefilled_tokens
from qarl.rollout.types import Group


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right."""

    tokens: torch.Tensor
    """Token ids, int64 [B, T]: prompt, then response, then padding."""
    length: torch.Tensor
    """Number of tokens of prompt and response, int64 [B]."""
    response_mask: torch.Tensor
    """Positions whose next token is learned from, bool [B, T-1]: True if tokens[:, 1:] is a token
    of the response, unless an environment wrote it between the turns of a conversation.
    """
    sampler_logprobs: torch.Tensor
    """Log-probs by the sampler, fp32 [B, T-1], zero outside the mask."""
    advantages: torch.Tensor
    """Advantage of each token, fp32 [B, T-1], zero outside the mask."""
    group: torch.Tensor
    """Number of the prompt that each sequence answers, int64 [B]."""
    experts: torch.Tensor | None = None
    """Experts to which the sampler routed each token in each decoder layer, int32 [B, T, L, K], -1
    where it did not report them; None if routing is not replayed.
    """
    ended: torch.Tensor | None = None
    """Whether each sequence's last token is the end token, bool [B]; False if it was cut off. None
    if that is unknown.
    """
    versions_behind: torch.Tensor | None = None
    """Number of weight versions published since each token was sampled, int64 [B, T-1], 0 outside
    the mask; None if all tokens are current.
    """
    picture_rows: torch.Tensor | None = None
    """What the engine's tower made of the pictures of all prompts, compute dtype [P, C], or more
    columns (`EmbeddedPictures.rows`); None if prompts are text alone.
    """
    picture_index: torch.Tensor | None = None
    """Row of `picture_rows` that stands in place of each token, int64 [B, T]; -1 for text. None if
    prompts are text alone.
    """
    picture_positions: torch.Tensor | None = None
    """Position of each token in time, height and width, int64 [B, T, 3]. None if prompts are text
    alone, or the model counts tokens alone.
    """
    picture_sees: torch.Tensor | None = None
    """Number of leading tokens of its sequence that each token sees, int64 [B, T]. None if it sees
    those before it and itself.
    """

    @property
    def pictures(self) -> PictureRows | None:
        """The pictures of the prompts, for the model's forward; None if there are none."""
        if self.picture_rows is None or self.picture_index is None:
            return None
        return PictureRows(
            self.picture_rows, self.picture_index, self.picture_positions, self.picture_sees
        )

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on a device."""
        return Batch(**{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def real(self) -> torch.Tensor:
        """Return which of `tokens` are not padding, bool [B, T]."""
        return torch.arange(self.tokens.shape[1])[None] < self.length.cpu()[:, None]

    def prompt_length(self) -> torch.Tensor:
        """Return the number of tokens before the first one to learn from, int64 [B].

        It is 0 if there is no token to learn from.
        """
        first = self.response_mask.int().argmax(-1) + 1
        return torch.where(self.response_mask.any(-1), first, 0)

    def packed(self, share_prompts: bool = False) -> Packed:
        """Return how to pack all sequences into one row.

        share_prompts: the sequences of a group store their common prompt once, in the first of
        them. A sequence whose prompt differs from the first one's, in tokens, experts or pictures,
        keeps its own.
        """
        device = self.length.device
        width = self.tokens.shape[1]
        nothing = torch.zeros_like(self.length)
        rows = torch.arange(len(self.length), device=device)
        prompt = self.prompt_length()
        prefilled = prefilled_tokens(self.response_mask, self.length)
        if not share_prompts:
            return pack(self.length, width, nothing, rows, prefilled)
        # Each row's leader is the first row of its group, which stores the prompt.
        groups, group_of_row = self.group.unique(return_inverse=True)
        first_rows = torch.full_like(groups, len(rows))
        first_rows = first_rows.scatter_reduce(0, group_of_row, rows, "amin")
        leader = first_rows[group_of_row]
        differs = self.tokens != self.tokens[leader]
        if self.experts is not None:
            differs |= (self.experts != self.experts[leader]).flatten(2).any(-1)
        if self.picture_index is not None:
            differs |= self.picture_index != self.picture_index[leader]
        in_prompt = torch.arange(width, device=device) < prompt[:, None]
        same_prompt = ~(differs & in_prompt).any(-1) & (prompt <= self.length[leader])
        shares = (leader != rows) & same_prompt
        shared = torch.where(shares, prompt, nothing)
        return pack(self.length, width, shared, leader, prefilled)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name of their field, without those that are None."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def rows(self, index: torch.Tensor) -> "Batch":
        """Return the sequences at `index` (int64 [n]), padded to the longest of them."""
        longest = int(self.length[index].max())
        of_predicted = ("response_mask", "sampler_logprobs", "advantages", "versions_behind")
        widths = dict.fromkeys(of_predicted, longest - 1)
        of_tokens = ("tokens", "experts")
        of_pictures = ("picture_index", "picture_positions", "picture_sees")
        widths |= dict.fromkeys((*of_tokens, *of_pictures), longest)
        picked = {
            # the rows of pictures are those of the whole batch, which `picture_index` counts
            name: tensor if name == "picture_rows" else tensor[index]
            for name, tensor in self._tensors().items()
        }
        for name in widths.keys() & picked.keys():
            picked[name] = picked[name][:, : widths[name]]
        return Batch(**picked)


def make_batch(
    groups: Sequence[Group],
    pad_token: int = 0,
    advantage: str = "grpo",
    version: int | None = None,
) -> Batch:
    """Return a batch with every completion of every group as one row, in order.

    All tokens of a response share its advantage.

    Args:
        pad_token: token id of the padding.
        advantage: name of the estimator, see `learner.objectives.advantages`.
        version: weight version that learns. None: the one that sampled, so no token is behind.

    Raises:
        PolicyError: rewards are not one finite number a completion, log-probs are not one a token,
            or there is no completion.
    """
    for number, group in enumerate(groups):
        answers = group.completions
        rewards = group.rewards
        finite = all(isinstance(reward, Real) and isfinite(reward) for reward in rewards)
        if len(rewards) != len(answers) or not finite:
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
    sequence_advantages = _advantages([group.rewards for group in groups], advantage)
    pairs = [
        (number, group.prompt.token_ids, completion)
        for number, group in enumerate(groups)
        for completion in group.completions
    ]
    length = torch.tensor([len(prompt) + len(c.token_ids) for _, prompt, c in pairs])
    longest = int(length.max())
    tokens = torch.full((len(pairs), longest), pad_token, dtype=torch.int64)
    response_mask = torch.zeros((len(pairs), longest - 1), dtype=torch.bool)
    sampler = torch.zeros((len(pairs), longest - 1), dtype=torch.float32)
    behind = torch.zeros((len(pairs), longest - 1), dtype=torch.int64)
    for row, (_, prompt, completion) in enumerate(pairs):
        start = len(prompt)
        end = start + len(completion.token_ids)
        tokens[row, :end] = torch.tensor([*prompt, *completion.token_ids])
        # Position t of these tensors is about token t + 1.
        response = slice(start - 1, end - 1)
        response_mask[row, response] = torch.tensor(completion.sampled, dtype=torch.bool)
        sampler[row, response] = torch.tensor(completion.logprobs)
        if version is not None:
            behind[row, response] = version - torch.tensor(completion.versions)
            behind[row] *= response_mask[row]
    advantages = torch.where(response_mask, sequence_advantages[:, None], 0.0)
    experts = _stack_experts([completion.experts for _, _, completion in pairs], longest)
    return Batch(
        tokens=tokens,
        length=length,
        response_mask=response_mask,
        sampler_logprobs=sampler,
        advantages=advantages,
        group=torch.tensor([number for number, _, _ in pairs]),
        experts=experts,
        ended=torch.tensor([completion.finish_reason == "stop" for _, _, completion in pairs]),
        versions_behind=None if version is None else behind,
        **_stack_pictures(groups, longest),
    )


def _advantages(rewards: Sequence[Sequence[float]], estimator: str) -> torch.Tensor:
    """Return the advantage of each sequence, fp32 [B].

    Groups are normally of one size and are computed at once. Sizes differ only if a reward
    abstained from judging some completions.
    """
    if len({len(group) for group in rewards}) == 1:
        return group_advantages(torch.tensor(rewards, dtype=torch.float32), estimator).flatten()
    by_group = [
        group_advantages(torch.tensor([group], dtype=torch.float32), estimator) for group in rewards
    ]
    return torch.cat(by_group, dim=1).flatten()


def _stack_pictures(groups: Sequence[Group], longest: int) -> dict[str, torch.Tensor]:
    """Return `picture_rows` and `picture_index` of all completions; {} if all prompts are text.

    With them, if the engine places pictures on three axes, `picture_positions`, and `picture_sees`
    if tokens of a picture see later ones.

    Completions of a group share their prompt's rows. Raises `PolicyError` if the engine did not say
    what it made of a prompt's pictures, because the log-probs would be those of another prompt.
    """
    rows: list[torch.Tensor] = []
    index: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    sees: list[torch.Tensor] = []
    counted = torch.arange(longest)[:, None].expand(-1, 3)
    before = torch.arange(1, longest + 1)
    start = 0
    for group in groups:
        of_prompt = torch.full((longest,), -1, dtype=torch.int64)
        placed = counted
        seen = before
        embedded = next((answer.pictures for answer in group.completions), None)
        if embedded is not None:
            count = len(embedded.places)
            of_prompt[embedded.places] = torch.arange(start, start + count)
            rows.append(embedded.rows)
            start += count
            if embedded.positions is not None:
                placed = _placed(embedded.positions, longest)
            if embedded.sees is not None:
                seen = torch.cat([embedded.sees, before[len(embedded.sees) :]])
        elif group.prompt.pictures is not None and group.completions:
            raise PolicyError(
                f"prompt {group.prompt.id!r} has pictures, and its completions come without what"
                " the engine made of them; learn from completions of an engine in this process"
            )
        index += [of_prompt] * len(group.completions)
        positions += [placed] * len(group.completions)
        sees += [seen] * len(group.completions)
    if not rows:
        return {}
    stacked = {"picture_rows": torch.cat(rows), "picture_index": torch.stack(index)}
    if any(placed is not counted for placed in positions):
        stacked["picture_positions"] = torch.stack(positions)
    if any(seen is not before for seen in sees):
        stacked["picture_sees"] = torch.stack(sees)
    return stacked


def _placed(prompt: torch.Tensor, longest: int) -> torch.Tensor:
    """Return the positions of a prompt's tokens and of those after it, int64 [longest, 3].

    prompt: int64 [T, 3]. Tokens after it count on from its largest position, on all axes.
    """
    later = torch.arange(1, 1 + longest - len(prompt)) + prompt.max()
    return torch.cat([prompt, later[:, None].expand(-1, 3)])


def _stack_experts(chosen: Sequence[Any], longest: int) -> torch.Tensor | None:
    """Return `Completion.experts` of every row as int32 [B, T, L, K].

    The last token of a row was never routed. None if the experts of any row are unknown.
    """
    if any(experts is None for experts in chosen):
        return None
    shape = (len(chosen), longest, *chosen[0].shape[1:])
    stacked = torch.full(shape, -1, dtype=torch.int32)
    for row, experts in enumerate(chosen):
        stacked[row, : len(experts)] = torch.from_numpy(experts.astype("int32"))
    return stacked


def mini_batches(batch: Batch, count: int, seed: int) -> list[torch.Tensor]:
    """Return the row indices of up to `count` mini-batches, int64 [n] each.

    Groups stay whole. They are shuffled by `seed`, and the numbers of groups differ by one at most.
    """
    groups = int(batch.group.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(groups, generator=generator).to(batch.group.device)
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
    """Cut `index` into micro-batches of similar length, longest first, of up to `max_tokens`.

    A sequence that is longer than `max_tokens` is a micro-batch of its own. With shared prompts
    the first sequence of a group, its leader, stores the prompt, and its followers do without.

    Args:
        packed: count the sequences' own tokens. Default: count them padded to the longest of the
            micro-batch.
        share_prompts: count a group's prompt once. Groups stay together, and leaders come before
            all followers.
    """
    length = batch.length.tolist()
    group = batch.group.tolist()
    prompt = batch.prompt_length().tolist()
    rows: list[int] = sorted(index.tolist(), key=lambda row: -length[row])
    if share_prompts:
        longest = {group[row]: length[row] for row in reversed(rows)}
        rows.sort(key=lambda row: (-longest[group[row]], group[row]))
    leaders: list[int] = []
    followers: list[int] = []
    size = 0
    for row in rows:
        shares = share_prompts and bool(leaders) and group[row] == group[leaders[-1]]
        if packed:
            size += length[row] - prompt[row] * shares
        else:
            # Rows are padded to the first, which is the longest.
            size += length[leaders[0] if leaders else row]
        if size > max_tokens and leaders:
            yield _ordered_rows(leaders, followers, prompt, length)
            leaders = []
            followers = []
            size = length[row]
            shares = False
        (followers if shares else leaders).append(row)
    if leaders:
        yield _ordered_rows(leaders, followers, prompt, length)


def _ordered_rows(
    leaders: list[int], followers: list[int], prompt: list[int], length: list[int]
) -> torch.Tensor:
    """Return the rows of a micro-batch in the order that they are computed in, int64 [n].

    Rows that see equally many tokens and add equally many are neighbours, so that they are
    multiplied at once.
    """
    followers = sorted(followers, key=lambda row: (-prompt[row], -length[row]))
    return torch.tensor(leaders + followers)
