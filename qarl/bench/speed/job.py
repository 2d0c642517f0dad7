"""What `qarl bench speed` asks of a scheme's process, and what that answers. Imports nothing heavy."""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KINDS = ("bf16", "plain", "qarl")
"""What is trained and what samples: nothing low-bit; a plain 16-bit learner under a low-bit sampler; QaRL."""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""What seconds are counted by. cpu: those of all the process's threads, which other processes disturb less."""

PHASES = ("sample", "old", "forward", "backward", "optimizer", "materialize", "publish", "rest")
"""Of a step, in its order. rest: making the batch and what no phase times."""


@dataclass(frozen=True)
class Job:
    """One process: a scheme's engine, and a learner beside it.

    model: folder. batches, contexts: sequences at once, and tokens of each before what is timed. decode_tokens: decoded
    a sequence and cell. step: prompts, samples a prompt, tokens a prompt and a completion of the training step.
    updates: optimizer steps a batch. steps: timed ones of each kind. kinds: of `KINDS`, in the order to measure them.
    memory: whether to take the memory of one more step. cache_gib: keys and values.
    clock: of `CLOCKS`.
    """

    model: str
    scheme: str
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
    kinds: tuple[str, ...]
    memory: bool
    cache_gib: int
    kernel: str = "auto"
    seed: int = 0
    clock: str = "wall"

    def as_argument(self) -> str:
        """For the worker's command line."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Cell:
    """One measurement of the engine, the quickest of its repeats. prefill_seconds: from `batch` prompts of `context`
    tokens to the first token after each. decode_seconds: of a decoding step, one more token a sequence."""

    context: int
    batch: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes. masters, optimizer, codes: of the learner's tensors, codes as published. engine: resident growth at the
    engine's start; cache: what its keys and values may take of that. peak: of a step, beyond the process before any
    model."""

    masters: int
    optimizer: int
    codes: int
    engine: int
    cache: int
    peak: int


@dataclass(frozen=True)
class Answer:
    """Of one process. machine: of `Machine`. steps: kind → phase → seconds, of each timed step. memory: kind → it, of
    kinds that were asked for it."""

    machine: dict[str, Any]
    cells: list[Cell]
    steps: dict[str, list[dict[str, float]]]
    memory: dict[str, Memory] = field(default_factory=dict)

    @staticmethod
    def parse(data: dict[str, Any]) -> "Answer":
        """From a worker's answer."""
        memory = {kind: Memory(**values) for kind, values in data["memory"].items()}
        return Answer(data["machine"], [Cell(**cell) for cell in data["cells"]], data["steps"], memory)
