"""Stand-in for an engine when a run learns from recorded completions.

It accepts published versions but cannot sample.
"""

from collections.abc import Iterable
from typing import Any

from qarl.quant.digest import digested
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.engine import EngineError, LoadReport


class AbsentEngine:
    """Engine that cannot sample (`rollout.engine.SamplingEngine`).

    It reads a published stream to compute its digest, and drops the tensors.
    """

    weight_version = 0

    def generate(self, *_: Any, **__: Any) -> Any:
        """Raise `EngineError`, as do `logprobs` and `logprobs_of_each`."""
        raise EngineError("a replay has no engine to sample with; leave from_rollouts out")

    logprobs = logprobs_of_each = generate

    def layer_reports(self) -> list[LayerReport]:
        """Return an empty list."""
        return []

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """Return a report with the stream's digest, in which no layer is missing."""
        digest = digested(stream)
        self.weight_version = version
        return LoadReport(
            digest=digest.hexdigest(),
            unconsumed=(),
            missing=(),
        )

    def shared_layers(self) -> None:
        """Return None, so that the learner makes its own layers."""

    def close(self) -> None:
        """Do nothing."""
