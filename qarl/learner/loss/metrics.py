"""Metrics of a mini-batch's loss.

To add a metric, add a field here and compute its value in `learner.loss.loss`, or in the learner.
Adding up, averaging and writing follow from the field. CONTRIBUTING.md names its documentation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from qarl.learner.processes import Processes


@dataclass(frozen=True)
class LossMetrics:
    """A micro-batch's share of its mini-batch's means.

    A share is a sum over the sequences of the micro-batch, divided by the mini-batch's number of
    sequences. So shares add up: over micro-batches with `+`, over processes with `total`. None
    means that the metric was not measured. This is so for `phantom_clipped`, the three sides of
    clipping and `update_log_ratio` if old log-probs were not needed (`LossInput`).
    """

    loss: float = 0.0
    """The loss that is minimized, with the KL penalty and the load-balance loss."""
    clipped: float = 0.0
    """Fraction of the tokens whose ratio reached a bound."""
    phantom_clipped: float | None = 0.0
    """Fraction of the tokens that are clipped only because of the precision gap."""
    clipped_positive_above: float | None = 0.0
    """Fraction of the tokens clipped with A > 0 and a ratio above 1, phantom clips excluded."""
    clipped_negative_above: float | None = 0.0
    """Fraction of the tokens clipped with A < 0 and a ratio above 1, phantom clips excluded."""
    clipped_negative_below: float | None = 0.0
    """Fraction of the tokens clipped with A < 0 and a ratio below 1, phantom clips excluded."""
    corrected: float = 0.0
    """Fraction of the tokens whose correction weight was capped or masked."""
    ratio_mean: float = 0.0
    """Mean of π_cur / π_proximal."""
    update_log_ratio: float | None = 0.0
    """Mean over the sequences of |mean_t log π_cur / π_old|."""
    kl: float = 0.0
    """Estimate of the KL divergence from the reference policy, nats a token."""
    load_balance: float = 0.0
    """The routers' auxiliary loss; 0 if it is off."""

    @classmethod
    def of(cls, numbers: Mapping[str, torch.Tensor | None]) -> "LossMetrics":
        """Return metrics from 0-d tensors on one device, by field. Waits for the device once."""
        measured = [number.double() for number in numbers.values() if number is not None]
        # One transfer for all of them, because each one waits for the device.
        values = iter(torch.stack(measured).tolist())
        fields_by_name: dict[str, Any] = {
            name: None if number is None else next(values) for name, number in numbers.items()
        }
        return cls(**fields_by_name)

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if a is None or b is None else a + b for a, b in pairs]
        return LossMetrics(*sums)

    def total(self, processes: Processes) -> "LossMetrics":
        """Return the sum over the processes.

        All of them call this, and have measured the same fields.
        """
        values = astuple(self)
        own = torch.tensor([value or 0.0 for value in values], dtype=torch.float64)
        sums = processes.all_reduce(own).tolist()
        measured: list[Any] = [
            None if value is None else total for value, total in zip(values, sums, strict=True)
        ]
        return LossMetrics(*measured)


def mean(updates: Sequence[LossMetrics]) -> LossMetrics:
    """Return the mean of each field over those of a batch's updates that measured it.

    Without updates, all fields are zero.
    """
    if not updates:
        return LossMetrics()
    columns = zip(*map(astuple, updates), strict=True)
    means: list[Any] = []
    for column in columns:
        measured = [value for value in column if value is not None]
        means.append(sum(measured) / len(measured) if measured else None)
    return LossMetrics(*means)
