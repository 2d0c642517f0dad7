"""What becomes of updates on their way to the sampler, measured every so many steps (`learner.diagnostics_every`).

An update of 1e-6 can be lost twice: where a 16-bit master is rounded back to what it was, and where a master moved and
its low-bit code did not.

    lost_updates    of the weights the optimizer meant to move, the share whose stored master did not change
    flipped_codes   of all low-bit codes, the share that a materialization changed

`learner.decomposition` measures in the same steps what of it the sampler's policy does.
"""

from quant.materialize.code_changes import FlipCount


def is_due(every: int, step: int) -> bool:
    """Whether training step `step` (from 0) is measured: the first one, and each `every`-th from there; 0: none."""
    return every > 0 and step % every == 0


class Diagnosis:
    """Of one batch's updates. flips: counts over their materializations."""

    def __init__(self) -> None:
        self.flips = FlipCount()
        self._lost: list[float] = []

    def add(self, lost: float | None) -> None:
        """Take in what an optimizer step returned (`MasterOptimizer.step` with `diagnose`)."""
        if lost is not None:
            self._lost.append(lost)

    @property
    def lost_updates(self) -> float | None:
        """Mean over the updates taken; None where there were none."""
        return sum(self._lost) / len(self._lost) if self._lost else None

    @property
    def flipped_codes(self) -> float | None:
        """Mean over the updates taken; None where there were none, or no layer has low-bit codes."""
        return self.flips.share
