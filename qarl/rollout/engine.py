"""The interface that the rest of the code uses of an engine, and its errors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qarl.configs.errors import QarlError
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.types import Completion, Prompt, Sampling

if TYPE_CHECKING:  # which imports torch; the protocol stays light
    from qarl.quant.kernels.engine_layers import EngineLayers


class EngineError(QarlError, heading="engine"):
    """The engine could not start, died, or refused what it was given."""


class LostServerError(EngineError):
    """A server is unreachable, shows no sign of life, or lacks the weights published last."""


class AnswerError(EngineError):
    """One answer broke off or is unusable. The request may be repeated."""


class BrokenAnswerError(AnswerError):
    """An answer broke off during the transfer."""


@dataclass(frozen=True)
class LoadReport:
    """Result of loading a published stream into an engine."""

    digest: str
    """Digest of the tensors that arrived (`quant.digest`)."""
    unconsumed: tuple[str, ...]
    """Names of layers of the stream that the engine does not have."""
    missing: tuple[str, ...]
    """Names of engine layers that did not get all the tensors they expected."""

    def took_all_of(self, digest: str) -> bool:
        """Return whether the stream with this digest was loaded completely."""
        return self.digest == digest and not self.unconsumed and not self.missing


class SamplingEngine(Protocol):
    """A sampler that holds one weight version."""

    weight_version: int
    """Version that was loaded last."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """Return `sampling.samples` completions of each prompt, in the prompts' order."""
        ...

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the fp32 log-probs of tokens 1… of each sequence, in nats.

        Each is conditioned on the tokens before it.
        """
        ...

    def logprobs_of_each(
        self,
        sequences: Sequence[Sequence[int]],
    ) -> list[list[list[float]]]:
        """Return `logprobs` from each replica that samples; an engine in this process is one."""
        ...

    def layer_reports(self) -> list[LayerReport]:
        """Return the engine's side of the audit, one entry per checkpoint layer.

        Fused layers are listed by their parts.
        """
        ...

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """Load a published stream into the running engine; later completions carry `version`."""
        ...

    def shared_layers(self) -> "EngineLayers | None":
        """Return the engine's own layers, so that the caller can multiply with its weight version.

        Returns None if the layers are in another process.
        """
        ...

    def close(self) -> None:
        """Free the engine. A closed engine must not be used again."""
        ...
