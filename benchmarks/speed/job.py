"""What `python -m benchmarks speed` asks of a scheme's process, and what that answers. Imports nothing heavy."""

from dataclasses import dataclass

KINDS = ("bf16", "plain", "qarl")
"""What is trained and what samples: nothing low-bit; a plain 16-bit learner under a low-bit sampler; QaRL."""

PHASES = ("sample", "old", "forward", "backward", "optimizer", "materialize", "publish", "rest")
"""Of a step, in its order. rest: making the batch and what no phase times."""


@dataclass(frozen=True)
class Options:
    """model: a name of `benchmarks.models.MODELS`, of an embedded policy, a folder or a hub id. schemes: none for all
    that run here. batches, contexts: sequences at once, and tokens of each before what is timed. decode_tokens: decoded
    a sequence and cell. prompts, samples a prompt, tokens of a prompt and a completion: of the training step. updates:
    optimizer steps a batch. steps: timed ones of each kind. rounds: of all processes."""

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
    kernel: str
    seed: int


@dataclass(frozen=True)
class Job:
    """One process: a scheme's engine, and a learner beside it. folder: of the model. kinds: of `KINDS`, in the order to
    measure them. cache_gib: keys and values."""

    folder: str
    scheme: str
    kinds: tuple[str, ...]
    cache_gib: int
    options: Options


@dataclass(frozen=True)
class Cell:
    """One measurement of the engine, the quickest of its repeats. prefill_seconds: from `batch` prompts of `context`
    tokens to the first token after each. decode_seconds: of a decoding step, one more token a sequence."""

    context: int
    batch: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Answer:
    """Of one process. steps: kind → phase → seconds, of each timed step."""

    cells: list[Cell]
    steps: dict[str, list[dict[str, float]]]
