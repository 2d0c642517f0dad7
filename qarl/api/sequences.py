"""Token ids in transformers' shapes → the sequences that are in them. Axes: B rows, T tokens of a row."""

from dataclasses import dataclass

import torch
from torch import nn

from qarl.configs.errors import PolicyError
from qarl.quant.graph.packing import Packed, Sequences


@dataclass(frozen=True)
class TokenRows:
    """tokens: int64 [B, T]. real: bool [B, T], those that belong to a sequence. lengths: of the sequences, in row-major
    order. predicted: bool [B, T-1], where the next token of the row is of the same sequence."""

    tokens: torch.Tensor
    real: torch.Tensor
    lengths: tuple[int, ...]
    predicted: torch.Tensor

    def packed(self) -> Packed:
        """For a forward over all sequences in one row."""
        places = self.real.flatten().cumsum(0).view(self.real.shape) - 1
        return Packed(self.real, places.where(self.real, 0), Sequences.apart(self.lengths))

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Values of tokens, [B, T] → one sequence a row, padded with zeros on the right."""
        return nn.utils.rnn.pad_sequence(list(values[self.real].split(self.lengths)), batch_first=True)


def token_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, vocabulary: int,
) -> TokenRows:  # fmt: skip
    """See `Policy.forward`. Raises `PolicyError` for tensors that contradict each other."""
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if cu_seqlens is not None and position_ids is None:
        position_ids = Sequences.apart(cu_seqlens.diff().tolist()).positions(input_ids.device)[None]
    positions = real.cumsum(-1) - 1 if position_ids is None else position_ids
    if input_ids.ndim != 2 or not input_ids.shape == real.shape == positions.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (input_ids, real, positions))
        raise PolicyError(f"input_ids, attention_mask and positions are {shapes}; give each as [B, T]")
    flat, tokens = positions[real], input_ids[real]
    lengths = [*(flat == 0).nonzero().flatten().tolist(), len(flat)]
    lengths = torch.tensor(lengths).diff().tolist()
    if not len(flat) or tokens.min() < 0 or tokens.max() >= vocabulary:
        raise PolicyError(f"input_ids must hold a token, and ids from 0 to {vocabulary - 1} alone: {tokens.tolist()}")
    if not torch.equal(flat, Sequences.apart(lengths).positions(flat.device)) or (positions * real)[:, 0].any():
        raise PolicyError(
            f"position_ids {flat.tolist()} must count each sequence's tokens from 0 one by one (cu_seqlens: from 0 to "
            "the tokens of a single row), and begin anew in every row; leave them out for rows of one sequence"
        )
    predicted = real[:, 1:] & real[:, :-1] & (positions[:, 1:] == positions[:, :-1] + 1)
    return TokenRows(input_ids.long(), real, tuple(lengths), predicted)
