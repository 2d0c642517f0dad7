"""Fills the caller's `TokenLog`, where `Learner.learn` was given one."""

from typing import Any

from qarl.learner.diagnostics.base import MicroBatch, Observer


class TokenRecord(Observer):
    """What a batch's updates make of every token."""

    def micro_batch(self, micro: MicroBatch) -> None:
        """Add its tokens."""
        if self.learning.log is not None:
            self.learning.log.add(micro.index, micro.tokens)

    def record(self) -> dict[str, Any]:
        """No metric; the log is complete."""
        if self.learning.log is not None:
            self.learning.log.complete(self.learning.old, self.learning.processes)
        return {}
