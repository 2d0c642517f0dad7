"""Sequences one after the other in one row: no padding, and common prefixes are computed once.

Completions of one prompt share its tokens, and under causal attention everything computed from
them. The first sequence of a group therefore brings prompt and response. The others bring only
their responses, whose queries see the first one's prompt.

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
    """The sequences of a row, for its attention."""

    lengths: tuple[int, ...]
    """Number of tokens of each sequence in the row, Σ = N."""
    seen: tuple[int, ...]
    """Number of tokens that the last token of each sequence sees, Σ = S: its own and those before
    it, which may be another sequence's.
    """
    places: torch.Tensor | None = None
    """int64 [S], positions in the row of the tokens that are seen. None: each sequence sees only
    its own.
    """
    prefilled: tuple[int, ...] | None = None
    """Number of leading tokens that each sequence sees and that the engine computed together, as a
    prompt; it computed later ones one by one. None: unknown. Only layers with a state depend on it.
    """
    sees: torch.Tensor | None = None
    """int64 [N], number of leading tokens of its sequence that each token sees; a token of a
    picture may see later ones of the picture. None: each sees those before it and itself.
    """

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> "Sequences":
        """Return sequences of these lengths that share no tokens."""
        return cls(tuple(lengths), tuple(lengths))

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the position of each token of the row within its sequence, from 0: int64 [N]."""
        length, seen = torch.tensor([self.lengths, self.seen]).to(device)
        # position in the sequence - position in the row, the same for all tokens of a sequence
        offset = (seen - length.cumsum(0)).repeat_interleave(length, output_size=sum(self.lengths))
        return torch.arange(len(offset), device=device) + offset

    def visible(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the keys or values that the sequences see: [N, …] → [S, …]."""
        return rows if self.places is None else Pick.apply(rows, self.places)

    def summed(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `visible`'s argument from that of its result, [S, …] → [N, …]."""
        if self.places is None:
            return gradients
        return _summed(gradients, self.places, sum(self.lengths))


@dataclass(frozen=True)
class PictureRows:
    """Outputs of a tower for pictures, and the tokens in whose places they stand."""

    rows: torch.Tensor
    """Compute dtype [P, C]; of models whose deeper layers have outputs of their own, [P, n · C]."""
    index: torch.Tensor
    """int64 [B, T] or [N]: for each token its row in `rows`; -1 for text."""
    positions: torch.Tensor | None = None
    """int64 [B, T, 3] or [N, 3]: each token's position in time, height and width. None if the model
    counts tokens alone.
    """
    sees: torch.Tensor | None = None
    """int64 [B, T] or [N]: number of leading tokens of its sequence that each token sees. None:
    those before it and itself.
    """

    @property
    def is_picture(self) -> torch.Tensor:
        """Return which tokens stand for a part of a picture, bool in the shape of `index`."""
        return self.index >= 0

    @property
    def any(self) -> bool:
        """Return whether any token does."""
        return bool(self.is_picture.any())

    @property
    def in_order(self) -> torch.Tensor:
        """Return the row of each of these tokens, in row-major order: compute dtype [n, C]."""
        return self.rows[self.index[self.is_picture]]

    def of(self, kept: torch.Tensor) -> "PictureRows":
        """Return the same for the tokens at True of `kept` (bool [B, T]), in a row."""
        positions = None if self.positions is None else self.positions[kept]
        sees = None if self.sees is None else self.sees[kept]
        return PictureRows(self.rows, self.index[kept], positions, sees)


@dataclass(frozen=True)
class Packed:
    """Arrangement of padded sequences in a row."""

    kept: torch.Tensor
    """bool [B, T], the tokens that are in the row, in row-major order."""
    places: torch.Tensor
    """int64 [B, T], position in the row of the results computed for each token; 0 for padding."""
    sequences: Sequences
    """The sequences of the row."""


def pack(
    length: torch.Tensor,
    longest: int,
    shared: torch.Tensor,
    leader: torch.Tensor,
    prefilled: torch.Tensor | None = None,
) -> Packed:
    """Return how to pack padded sequences into a row.

    Args:
        length: int64 [B], number of tokens of each sequence.
        longest: T, upper bound on `length`.
        shared: int64 [B], number of leading tokens, fewer than the sequence has, that are the same
            as the leader's.
        leader: int64 [B], index of the sequence that brings the shared tokens into the row.
        prefilled: int64 [B], `prefilled_tokens`. None: unknown.
    """
    token = torch.arange(longest, device=length.device)
    is_token = token < length[:, None]
    is_shared = token < shared[:, None]
    in_row = is_token & ~is_shared
    row_position = in_row.flatten().cumsum(0).view(in_row.shape) - 1
    places = torch.where(is_shared, row_position[leader], row_position).where(is_token, 0)
    # one transfer to the host for all
    counts = [length, shared] if prefilled is None else [length, shared, prefilled]
    seen, prefixes, *prompts = torch.stack(counts).tolist()
    lengths = tuple(total - prefix for total, prefix in zip(seen, prefixes, strict=True))
    visible = places[is_token] if any(prefixes) else None
    together = known(prompts[0]) if prompts else None
    return Packed(in_row, places, Sequences(lengths, tuple(seen), visible, together))


def pack_prompts(length: torch.Tensor, longest: int) -> Packed:
    """Return how to pack sequences that the engine computes whole, as prompts.

    length, longest: see `pack`.
    """
    rows = torch.arange(len(length), device=length.device)
    return pack(length, longest, torch.zeros_like(length), rows, length)


def prefilled_tokens(sampled: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return the number of leading tokens that the engine computed together, int64 [B].

    It is -1 for a conversation: a later turn begins with the earlier ones, which the engine then
    computes together, although it had sampled them one by one. A sequence of which no token was
    sampled counts as a prompt.

    Args:
        sampled: bool [B, T-1], positions whose next token was sampled.
        length: int64 [B], number of tokens of each sequence.
    """
    before = torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    turns = (sampled & ~before).sum(-1)
    first = sampled.int().argmax(-1) + 1
    return torch.where(turns == 0, length, torch.where(turns == 1, first, -1))


def known(prefilled: Sequence[int]) -> tuple[int, ...] | None:
    """Return these results of `prefilled_tokens`, or None if one is unknown."""
    return tuple(prefilled) if min(prefilled, default=0) >= 0 else None


class Pick(torch.autograd.Function):
    """Rows [N, …] at `places`, int64 [n], which may repeat.

    Gradients of a repeated row are summed in fp32 and rounded once.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the rows at `places`, [n, …]."""
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Return the gradient of all rows, [N, …]."""
        return _summed(grad_outputs[0], ctx.saved_tensors[0], ctx.count), None


def _summed(gradients: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Sum gradients [n, …] by place into [count, …] of the same dtype, in fp32."""
    total = gradients.new_zeros(count, *gradients.shape[1:], dtype=torch.float32)
    return add_rows(total, places, gradients.float()).to(gradients.dtype)
