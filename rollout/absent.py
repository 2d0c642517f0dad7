"""No engine, for learning from recorded completions: it takes what is published, and nothing can be asked of it."""

from collections.abc import Iterable, Sequence

from qarl.quant.digest import digested
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.types import Completion, Prompt, Sampling


class AbsentEngine:
    """Stands where an engine would (`rollout.engine.Engine`). What is published is read for its digest and let go."""

    weight_version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """Raises `EngineError`."""
        raise _absent()

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raises `EngineError`."""
        raise _absent()

    def logprobs_of_each(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Raises `EngineError`."""
        raise _absent()

    def layers(self) -> list[LayerReport]:
        """None."""
        return []

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """The stream's digest; all of it counts as consumed."""
        digest = digested(stream)
        self.weight_version = version
        return LoadReport(digest=digest.hexdigest(), consumed=digest.tensors, unconsumed=(), missing=())

    def shared_layers(self) -> None:
        """None: the learner makes its own."""

    def close(self) -> None:
        """Nothing to free."""


def _absent() -> EngineError:
    return EngineError("a replay has no engine to sample with; leave from_rollouts out")
