"""What a run asks of one server, whatever engine is in it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from qarl.quant.types import LayerReport
from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.servers.versions import Version
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.rollout.vllm.options import VllmOptions

_BYTES_A_SECOND = 50e6
"""That a server gets, reads, hashes and loads at the least; with `_SECONDS` more it is taken to hang."""
_SECONDS = 30.0


class LostServerError(EngineError):
    """A server that cannot be reached, shows no sign of life, or samples by other weights than were published last."""


class AnswerError(EngineError):
    """One answer that broke off or cannot be used: it may be asked for again."""


class BrokenAnswerError(AnswerError):
    """One that broke off on the way."""


def seconds_of(tensor_bytes: int) -> float:
    """That a server may take to get, to read, or to load, a version of so many bytes."""
    return _SECONDS + tensor_bytes / _BYTES_A_SECOND


class Replica(Protocol):
    """One server that holds the whole policy. Every method raises `LostServerError` where it is out of reach,
    `AnswerError` where an answer broke off or cannot be used, `EngineError` where it refuses."""

    url: str

    def allow_pause(self, seconds: float) -> None:
        """Not to be taken for lost where it is paused no longer than that while it samples."""
        ...

    async def admit(self, options: VllmOptions, learner: str, seconds: float | None = None) -> None:
        """Refuse one that has other settings than `options`, or belongs to another run. learner: this run's name.
        seconds: that it may take to answer."""
        ...

    async def claim(self, learner: str) -> None:
        """Make it this run's."""
        ...

    async def release(self) -> None:
        """Give it back; it goes on with the weights it has."""
        ...

    async def layers(self) -> list[LayerReport]:
        """Of its engine, for the audit."""
        ...

    async def sample(self, prompt: Prompt, sampling: Sampling, j: int, k: int, salt: str) -> Any:
        """Its answer to sample k of prompt j, for `read`. salt: of its prefix cache, one a weight version."""
        ...

    def read(self, answer: Any, labels: Mapping[str, int]) -> Completion:
        """The completion in an answer. labels: of the weights that may have sampled it, and their versions."""
        ...

    async def logprobs(self, sequence: Sequence[int], salt: str, labels: Mapping[str, int]) -> list[float]:
        """Of tokens 1… of a sequence, in nats."""
        ...

    async def held(self) -> list[str | None]:
        """The digest of the version that each of its workers keeps for a delta, None for nothing."""
        ...

    async def send(self, version: Version, run: str, sharing: int) -> str:
        """Copy a version's files; the folder they are in there. sharing: servers that are sent them at once."""
        ...

    async def stage(self, version: Version, folder: str, keep: bool) -> LoadReport:
        """Read and check a version beside the present one. keep: whether the next may be a delta from it."""
        ...

    async def commit(self, version: Version, label: str, in_flight: bool) -> LoadReport:
        """Sample by what was staged, and name it `label`. in_flight: requests under way go on by it."""
        ...

    async def abandon(self) -> None:
        """Forget what was staged."""
        ...
