"""What a mini-batch's loss tells. A new number is a field here with its value in `policy_loss` (or
the learner), and a line that shows it (qarl/report/dashboard.py); adding up, averaging and writing
follow from the field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from qarl.learner.processes import Processes


@dataclass(frozen=True)
class LossMetrics:
    """A micro-batch's share of its mini-batch's means: sums over the sequences at hand, over the
    mini-batch's count of sequences. So shares add up, over micro-batches with `+`, over processes
    with `total`. None: not measured.

    loss: what is descended, KL penalty and load-balance loss included. Shares of tokens: clipped,
    whose ratio reached a bound; phantom_clipped, of those the ones that only the precision gap put
    there; of the others that have an advantage, clipped_positive_above (A > 0, ratio above 1),
    clipped_negative_above and clipped_negative_below (A < 0); corrected, whose correction weight
    was capped or masked. ratio_mean: of π_cur/π_proximal. update_log_ratio: mean
    |log π_cur/π_old| of the sequences. (It, phantom_clipped and the sides are None where old
      log-probs were not needed, `LossInput`.) kl: to the reference, nats a token. load_balance: the
      routers' auxiliary loss, 0 without.
    """

    loss: float = 0.0
    clipped: float = 0.0
    phantom_clipped: float | None = 0.0
    clipped_positive_above: float | None = 0.0
    clipped_negative_above: float | None = 0.0
    clipped_negative_below: float | None = 0.0
    corrected: float = 0.0
    ratio_mean: float = 0.0
    update_log_ratio: float | None = 0.0
    kl: float = 0.0
    load_balance: float = 0.0

    @classmethod
    def of(cls, numbers: Mapping[str, torch.Tensor | None]) -> "LossMetrics":
        """Of 0-d tensors on one device, by field; waits for it once."""
        values = iter(
            torch.stack(
                [number.double() for number in numbers.values() if number is not None]
            ).tolist()
        )
        fields_of: dict[str, Any] = {
            n: None if number is None else next(values) for n, number in numbers.items()
        }
        return cls(**fields_of)

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if a is None or b is None else a + b for a, b in pairs]
        return LossMetrics(*sums)

    def total(self, processes: Processes) -> "LossMetrics":
        """The sum over processes, which all call this and have measured the same."""
        values = astuple(self)
        sums = processes.total(
            torch.tensor([v or 0.0 for v in values], dtype=torch.float64)
        ).tolist()
        measured: list[Any] = [None if v is None else s for v, s in zip(values, sums, strict=True)]
        return LossMetrics(*measured)


def mean(updates: Sequence[LossMetrics]) -> LossMetrics:
    """Over those of a batch's updates that measured it; zeros where there were no updates."""
    if not updates:
        return LossMetrics()
    columns = zip(*map(astuple, updates), strict=True)
    measured = [[value for value in column if value is not None] for column in columns]
    means: list[Any] = [sum(values) / len(values) if values else None for values in measured]
    return LossMetrics(*means)
