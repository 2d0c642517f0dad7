"""Job and answer of a scheme's process of `qarl bench speed`. Imports neither torch nor vLLM."""

from dataclasses import dataclass

KINDS = ("bf16", "plain", "qarl")
"""Pairs of learner and sampler: both in bf16; a 16-bit learner with a low-bit sampler; QaRL, both
low-bit.
"""

PHASES = (
    "sample",
    "old",
    "forward",
    "backward",
    "optimizer",
    "materialize",
    "publish",
    "rest",
)
"""Phases of a training step, in order. "rest" is making the batch, and whatever no phase times."""


@dataclass(frozen=True)
class SpeedOptions:
    """Options of `qarl bench speed`."""

    model: str
    """Name of an embedded policy, a folder or a hub id."""
    schemes: tuple[str, ...]
    """Names of schemes; empty for all that run on this machine."""
    dtype: str
    """Compute dtype."""
    batches: tuple[int, ...]
    """Numbers of sequences sampled together."""
    contexts: tuple[int, ...]
    """Tokens of each sequence before the timed ones; empty for the default of machine and model."""
    decode_tokens: int
    """Tokens decoded per sequence, in each combination of batch and context."""
    prompts: int
    """Prompts of the training step."""
    samples: int
    """Completions of each prompt."""
    prompt_tokens: int
    """Tokens of each prompt of the training step."""
    tokens: int
    """Tokens of each completion."""
    updates: int
    """Optimizer steps of a training step."""
    optimizer: str
    """Name of the optimizer."""
    steps: int
    """Timed training steps of each kind in each process."""
    rounds: int
    """Number of times that all processes run."""
    seed: int
    """Seed of prompts and samples."""

    @property
    def prompt_limit(self) -> int:
        """Return the tokens of the longest prompt."""
        return max(*self.contexts, self.prompt_tokens)

    @property
    def completion_limit(self) -> int:
        """Return the tokens of the longest completion.

        Decoding starts after a first token, which the prefill gives.
        """
        return max(self.decode_tokens + 1, self.tokens)


@dataclass(frozen=True)
class Job:
    """Job of one process: a scheme's engine and its learners."""

    folder: str
    """Folder of the model."""
    scheme: str
    kinds: tuple[str, ...]
    """Kinds of `KINDS`, in the order they are measured."""
    cache_gib: int
    """Size of the engine's key/value cache, GiB."""
    options: SpeedOptions


@dataclass(frozen=True)
class Cell:
    """The engine's times for one context and batch, of the quickest repeat."""

    context: int
    """Tokens of each prompt."""
    batch: int
    """Number of prompts."""
    prefill_seconds: float
    """Seconds from the request to the first token after each prompt."""
    decode_seconds: float
    """Seconds of a decoding step, which gives each sequence one more token."""


@dataclass(frozen=True)
class Answer:
    """Measurements of one process."""

    cells: list[Cell]
    steps: dict[str, list[dict[str, float]]]
    """Seconds by kind and phase, for each timed step; kinds in the order they were measured."""
    peak_bytes: int
    """Peak of memory until the first kind's steps were done: on CPUs the process's resident memory,
    on GPUs the memory that torch allocated.
    """
