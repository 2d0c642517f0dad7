"""What becomes of updates on their way to the sampler, measured every so many steps
(`learner.diagnostics_every`).

An update of 1e-6 can be lost twice: where a 16-bit master is rounded back to what it was, and where
a master moved and neither its low-bit code nor its bfloat16 rounding did.

    lost_updates      of the weights the optimizer meant to move, the share whose stored master did
    not change crossed_bfloat16  of all masters, the share that an update took to another bfloat16
    flipped_codes     of all low-bit codes, the share that a materialization changed

`diagnostics.decomposition` measures in the same steps what of it the sampler's policy does. Source
of the second: "Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026;
section 6.6).
"""

from typing import Any

from qarl.learner.diagnostics.base import Learning, Observer, is_due
from qarl.learner.diagnostics.figure import Figure
from qarl.learner.optim.optimizer import UpdateDiagnostics
from qarl.quant.materialize.code_changes import Changed, FlipCount


class LostUpdates(Observer):
    """Counts over a batch's updates and their materializations."""

    figures = (
        Figure(
            id="codes",
            title="Updates that count",
            unit="share",
            help=(
                "Low-bit codes that an update changed; masters that it took to another bfloat16;"
                " updates lost to the masters' rounding."
            ),
            lines={
                "flipped codes": "learn/flipped_codes",
                "crossed bfloat16": "learn/crossed_bfloat16",
                "lost updates": "learn/lost_updates",
            },
        ),
    )

    def __init__(self, learning: Learning):
        super().__init__(learning)
        self.counts_arrivals = is_due(learning.config.diagnostics_every, learning.step)
        self.flips = FlipCount() if self.counts_arrivals else None
        self._lost: list[float] = []
        self._crossed = Changed()

    def after_update(self, update: int, arrived: UpdateDiagnostics | None) -> None:
        """Take in what an optimizer step returned (`MasterOptimizer.step` with `diagnose`)."""
        if arrived is None:
            return
        self._lost.append(arrived.lost)
        self._crossed.add(arrived.crossed, arrived.weights)

    def record(self) -> dict[str, Any]:
        """Means over the updates taken, None where there were none; flipped_codes also where no
        layer has low-bit codes, crossed_bfloat16 where no weight of the model is trained (LoRA).
        """
        if self.flips is None:
            return dict.fromkeys(("lost_updates", "crossed_bfloat16", "flipped_codes"))
        return {
            "lost_updates": sum(self._lost) / len(self._lost) if self._lost else None,
            "crossed_bfloat16": None if self.learning.model.adapted else self._crossed.share,
            "flipped_codes": self.flips.share,
        }
