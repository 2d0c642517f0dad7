"""Sequences one after the other in one row: without padding, and what several begin with computed
once.

Completions of one prompt have its tokens in common, and under causal attention everything computed
of them. So the first of a group brings prompt and response, the others their responses, whose
queries see the first one's prompt.

Axes: B sequences, T tokens, N tokens of the row, S tokens that sequences see, over all of them, C
columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qarl.quant.layers.gradients import add_rows


@dataclass(frozen=True)
class Sequences:
    """The sequences of a row, for its attention.

    lengths: of each in the row, Σ = N. seen: how many tokens the last of each sees, Σ = S: its own
    and those before them, which are another's. places: int64 [S], where in the row these are; None
    where each sees its own alone.
    """

    lengths: tuple[int, ...]
    seen: tuple[int, ...]
    places: torch.Tensor | None = None

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> "Sequences":
        """Of so many tokens each, that share none."""
        return cls(tuple(lengths), tuple(lengths))

    def positions(self, device: torch.device) -> torch.Tensor:
        """Of the row's tokens in their sequences, from 0: int64 [N]."""
        length, seen = torch.tensor([self.lengths, self.seen]).to(device)
        before = (seen - length.cumsum(0)).repeat_interleave(length, output_size=sum(self.lengths))
        return torch.arange(len(before), device=device) + before

    def visible(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys or values [N, …] → those that the sequences see, [S, …]."""
        return rows if self.places is None else Pick.apply(rows, self.places)

    def summed(self, gradients: torch.Tensor) -> torch.Tensor:
        """The gradient of what `visible` gave → of what it was given."""
        return (
            gradients if self.places is None else _summed(gradients, self.places, sum(self.lengths))
        )


@dataclass(frozen=True)
class Packed:
    """How padded sequences are put into a row. kept: bool [B, T], the tokens that are in it, in
    row-major order. places: int64 [B, T], where in it is what was computed of each token, 0 for
    padding.
    """

    kept: torch.Tensor
    places: torch.Tensor
    sequences: Sequences


def pack(length: torch.Tensor, longest: int, shared: torch.Tensor, leader: torch.Tensor) -> Packed:
    """length: int64 [B], tokens of each sequence, at most `longest`, T. shared, leader: int64 [B],
    the first so many tokens of a sequence, fewer than it has, are those of the sequence numbered
    `leader`, which has them itself.
    """
    token = torch.arange(longest, device=length.device)
    real, of_leader = token < length[:, None], token < shared[:, None]
    kept = real & ~of_leader
    own = kept.flatten().cumsum(0).view(kept.shape) - 1
    places = torch.where(of_leader, own[leader], own).where(real, 0)
    seen, begun = torch.stack([length, shared]).tolist()
    lengths = tuple(all_of_it - first for all_of_it, first in zip(seen, begun, strict=True))
    return Packed(
        kept,
        places,
        Sequences(lengths, tuple(seen), places[real] if any(begun) else None),
    )


class Pick(torch.autograd.Function):
    """Rows [N, …] at places, int64 [n], the same one at several of them, too: what its gradients
    are is summed up in fp32 and rounded once.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[n, …]."""
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """[N, …]."""
        return _summed(grad_outputs[0], ctx.saved_tensors[0], ctx.count), None


def _summed(gradients: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """[n, …] → [count, …] in the same dtype."""
    total = gradients.new_zeros(count, *gradients.shape[1:], dtype=torch.float32)
    return add_rows(total, places, gradients.float()).to(gradients.dtype)
