"""The fraction of an update that reaches the sampler, measured every `learner.diagnostics_every`
steps.

An update of 1e-6 can be lost twice: a 16-bit master may be rounded back to its old value, and a
master that moved may have the same low-bit code and bfloat16 rounding as before.

    lost_updates      fraction of the weights the optimizer meant to move whose stored master did
                      not change
    crossed_bfloat16  fraction of all masters that an update moved to another bfloat16
    flipped_codes     fraction of all low-bit codes that a materialization changed

`diagnostics.decomposition` measures, in the same steps, what the sampler's policy makes of it.
Source of the second metric: "Defeating the trainer-generator precision mismatch in TRL" (Hugging
Face, 2026; section 6.6).
"""

from typing import Any

from qarl.learner.diagnostics.base import Learning, Observer, is_due
from qarl.learner.diagnostics.figure import Figure
from qarl.learner.optim.optimizer import UpdateDiagnostics
from qarl.quant.materialize.code_changes import Changed


class LostUpdates(Observer):
    """Observer that counts over a batch's updates and their materializations."""

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
        self.counts_changes = is_due(learning.config.diagnostics_every, learning.step)
        self._lost: list[float] = []
        self._crossed = Changed()

    def after_update(self, update: int, diagnostics: UpdateDiagnostics | None) -> None:
        """Add the counts of an optimizer step (`MasterOptimizer.step` with `diagnose`)."""
        if diagnostics is None or not self.counts_changes:
            return
        self._lost.append(diagnostics.lost)
        self._crossed.add(diagnostics.crossed, diagnostics.weights)

    def record(self) -> dict[str, Any]:
        """Return means over the updates taken; None if there were none.

        `flipped_codes` is also None if no layer has low-bit codes, and `crossed_bfloat16` if no
        weight of the model is trained (LoRA).
        """
        if not self.counts_changes:
            return dict.fromkeys(("lost_updates", "crossed_bfloat16", "flipped_codes"))
        return {
            "lost_updates": sum(self._lost) / len(self._lost) if self._lost else None,
            "crossed_bfloat16": None if self.learning.model.adapted else self._crossed.share,
            "flipped_codes": self.learning.flips.share,
        }
