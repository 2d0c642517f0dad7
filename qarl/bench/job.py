"""What `qarl bench speed` asks of a scheme's process, and what that answers. Imports neither torch
nor vLLM.
"""

from dataclasses import dataclass

KINDS = ("bf16", "plain", "qarl")
"""Pairs of learner and sampler: both in bf16; a 16-bit learner under a low-bit sampler; QaRL, both
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
"""Phases of a training step, in its order. rest: making the batch, and what no phase times."""


@dataclass(frozen=True)
class SpeedOptions:
    """What is measured.

    model: an embedded name, a folder or a hub id. schemes: names; none for all that run on this
    machine. dtype: the compute dtype. batches: numbers of sequences sampled together. contexts:
    tokens of each sequence before what is timed; none for the default of the machine and the model.
    decode_tokens: tokens decoded a sequence, in each combination of batch and context. prompts,
    samples: prompts of the training step, and completions of each prompt. prompt_tokens, tokens:
    tokens of each prompt and of each completion. updates: optimizer steps of a training step.
    optimizer: its name. steps: timed training steps of each kind in each process. rounds: number of
    times that all processes run. seed: of prompts and samples.
    """

    model: str
    schemes: tuple[str, ...]
    dtype: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_tokens: int
    prompts: int
    samples: int
    prompt_tokens: int
    tokens: int
    updates: int
    optimizer: str
    steps: int
    rounds: int
    seed: int

    @property
    def prompt_limit(self) -> int:
        """Return the tokens of the longest prompt."""
        return max(*self.contexts, self.prompt_tokens)

    @property
    def completion_limit(self) -> int:
        """Return the tokens of the longest completion: a decoded one has the prompt's first token
        besides.
        """
        return max(self.decode_tokens + 1, self.tokens)


@dataclass(frozen=True)
class Job:
    """One process: a scheme's engine and its learners.

    folder: of the model. kinds: of `KINDS`, in the order they are measured. cache_gib: GiB of keys
    and values.
    """

    folder: str
    scheme: str
    kinds: tuple[str, ...]
    cache_gib: int
    options: SpeedOptions


@dataclass(frozen=True)
class Cell:
    """The engine's seconds for one context and batch, the quickest of the repeats.

    prefill_seconds: from `batch` prompts of `context` tokens to the first token after each.
    decode_seconds: of a decoding step, which gives each sequence one more token.
    """

    context: int
    batch: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Answer:
    """What one process measured.

    steps: kind → phase → seconds, of each timed step; kinds in the order they were measured.
    peak_bytes: the process's peak of memory until the first kind's steps were done. On CPUs
    resident memory, on GPUs what torch allocated there.
    """

    cells: list[Cell]
    steps: dict[str, list[dict[str, float]]]
    peak_bytes: int
