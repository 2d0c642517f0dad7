"""What the rest of the code may ask of an engine."""

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
    """A server that cannot be reached, shows no sign of life, or samples by other weights than were
    published last.
    """


class AnswerError(EngineError):
    """One answer that broke off or cannot be used: it may be asked for again."""


class BrokenAnswerError(AnswerError):
    """One that broke off on the way."""


@dataclass(frozen=True)
class LoadReport:
    """What an engine did with a published stream.

    digest: of what arrived (`quant.digest`). consumed: tensors taken. unconsumed: sent names no
    layer took. missing: names of engine layers that expected tensors and got none or not all.
    """

    digest: str
    consumed: int
    unconsumed: tuple[str, ...]
    missing: tuple[str, ...]

    def took_all_of(self, digest: str) -> bool:
        """Whether the stream of that digest was loaded whole."""
        return self.digest == digest and not self.unconsumed and not self.missing


class Engine(Protocol):
    """A sampler holding one weight version."""

    weight_version: int

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.samples` completions of each prompt, in the prompts' order."""
        ...

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """fp32 log-probs of tokens 1… of each sequence given those before, in nats."""
        ...

    def logprobs_of_each(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """`logprobs` by each of the replicas that sample; an engine in this process is one."""
        ...

    def layers(self) -> list[LayerReport]:
        """The engine's side of the audit, one entry a checkpoint layer (fused layers are listed by
        their parts).
        """
        ...

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """Take a published stream into the running engine; later completions carry `version`."""
        ...

    def shared_layers(self) -> "EngineLayers | None":
        """The engine's own layers, to multiply its weight version with; None where they are in
        another process.
        """
        ...

    def close(self) -> None:
        """Free the engine. A closed engine is not used again."""
        ...
