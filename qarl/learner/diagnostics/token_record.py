"""Observer that fills in the caller's `TokenLog`, if `Learner.learn` was given one."""

from typing import Any

from qarl.learner.diagnostics.base import MicroBatch, Observer


class TokenRecord(Observer):
    """Observer that logs what a batch's updates do to every token."""

    def micro_batch(self, micro: MicroBatch) -> None:
        """Add the micro-batch's tokens to the log."""
        if self.learning.log is not None:
            self.learning.log.add(micro.index, micro.tokens)

    def record(self) -> dict[str, Any]:
        """Complete the log. Returns no metrics."""
        if self.learning.log is not None:
            self.learning.log.complete(self.learning.old, self.learning.processes)
        return {}
