"""No engine, for learning from recorded completions: it takes what is published, and nothing can be
asked of it.
"""

from collections.abc import Iterable
from typing import Any

from qarl.quant.digest import digested
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.engine import EngineError, LoadReport


class AbsentEngine:
    """Stands where an engine would (`rollout.engine.Engine`). What is published is read for its
    digest and let go.
    """

    weight_version = 0

    def generate(self, *_: Any, **__: Any) -> Any:
        """Raises `EngineError`, and so do `logprobs` and `logprobs_of_each`."""
        raise EngineError("a replay has no engine to sample with; leave from_rollouts out")

    logprobs = logprobs_of_each = generate

    def layers(self) -> list[LayerReport]:
        """None."""
        return []

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """The stream's digest; all of it counts as consumed."""
        digest = digested(stream)
        self.weight_version = version
        return LoadReport(
            digest=digest.hexdigest(),
            consumed=digest.tensors,
            unconsumed=(),
            missing=(),
        )

    def shared_layers(self) -> None:
        """None: the learner makes its own."""

    def close(self) -> None:
        """Nothing to free."""
