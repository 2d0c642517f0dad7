"""What a mini-batch's loss tells. A new number is a field here with its value in `policy_loss` (or the learner), and a
line that shows it (qarl/report/dashboard.py); adding up, averaging and writing follow from the field."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from learner.processes import Processes


@dataclass(frozen=True, kw_only=True)
class LossMetrics:
    """A micro-batch's share of its mini-batch's means: sums over the sequences at hand, over the mini-batch's count of
    sequences. So shares add up, over micro-batches with `+`, over processes with `total`.

    loss: what is descended, KL penalty and load-balance loss included. Shares of tokens: clipped, whose ratio reached a
    bound; phantom_clipped, of those the ones that only the precision gap put there; corrected, whose correction weight
    was capped or masked. update_log_ratio: mean |log π_cur/π_old| of the sequences. kl: to the reference, nats a token.
    load_balance: the routers' auxiliary loss, 0 without.
    """

    loss: float = 0.0
    clipped: float = 0.0
    phantom_clipped: float = 0.0
    corrected: float = 0.0
    update_log_ratio: float = 0.0
    kl: float = 0.0
    load_balance: float = 0.0

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        return _from_values([a + b for a, b in zip(_values(self), _values(other), strict=True)])

    def total(self, processes: Processes) -> "LossMetrics":
        """The sum over processes, which all call this."""
        return _from_values(processes.total(torch.tensor(_values(self), dtype=torch.float64)).tolist())


def mean(updates: Sequence[LossMetrics]) -> LossMetrics:
    """Over a batch's updates; zeros where there were none."""
    total = sum(updates, LossMetrics())
    return _from_values([value / max(len(updates), 1) for value in _values(total)])


def _values(metrics: LossMetrics) -> list[float]:
    return [getattr(metrics, f.name) for f in fields(LossMetrics)]


def _from_values(values: Sequence[float]) -> LossMetrics:
    return LossMetrics(**dict(zip((f.name for f in fields(LossMetrics)), values, strict=True)))
