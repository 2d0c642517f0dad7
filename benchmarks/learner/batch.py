"""What `python -m benchmarks learner` trains on: a batch of sequences of unequal lengths.

A batch is written as JSON and read by every trainer measured, so all of them see the same tokens,
rewards and sampler log-probs. Imports neither torch nor transformers: TRL's worker reads this file
too.
"""

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import END, BenchModel

_FIRST_WORD = 2
_PROMPT_SHARE = 0.5
"""Prompts are this share of the median completion, give or take a half."""

_SPREAD = 0.6
"""Standard deviation of the completions' log length: the longest of 64 is about four times the
median.
"""


@dataclass(frozen=True)
class Sequences:
    """One batch, groups of `samples` completions in order of their prompts. completions, logprobs
    (nats), rewards: one entry a sequence, B = len(prompts) * samples of them.
    """

    prompts: list[list[int]]
    samples: int
    completions: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]

    @property
    def tokens(self) -> int:
        """Of all sequences, prompt and completion, without padding."""
        return sum(len(p) for p in self.prompts) * self.samples + sum(
            len(c) for c in self.completions
        )

    def save(self, file: Path) -> None:
        """Write as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def load(file: Path) -> "Sequences":
        """Read what `save` wrote."""
        return Sequences(**json.loads(file.read_text()))


def draw_sequences(model: BenchModel, seed: int) -> Sequences:
    """A function of the model's sizes and the seed. Completion lengths are log-normal and end with
    the end token; every group has both rewards, so every sequence teaches; sampler log-probs are
    those of a nearly uniform policy.
    """
    draw = random.Random(f"{seed}")
    vocabulary = model.config["vocab_size"]

    def words(count: int) -> list[int]:
        return [draw.randrange(_FIRST_WORD, vocabulary) for _ in range(count)]

    half = max(1, round(model.tokens * _PROMPT_SHARE))
    prompts = [
        words(draw.randint(max(1, half // 2), half + half // 2)) for _ in range(model.prompts)
    ]
    count = model.prompts * model.samples
    lengths = [round(model.tokens * math.exp(draw.gauss(0, _SPREAD))) for _ in range(count)]
    completions = [[*words(min(max(n, 2), 8 * model.tokens) - 1), END] for n in lengths]
    logprobs = [[-math.log(vocabulary) + draw.gauss(0, 0.01) for _ in c] for c in completions]
    rewards = [float(i % model.samples < model.samples // 2) for i in range(count)]
    return Sequences(
        prompts=prompts,
        samples=model.samples,
        completions=completions,
        logprobs=logprobs,
        rewards=rewards,
    )


def digest(sequences: Iterable[Sequence[int]]) -> str:
    """SHA-256 of the sequences in any order: what a trainer proves it trained on."""
    found = hashlib.sha256()
    for sequence in sorted(tuple(int(t) for t in s) for s in sequences):
        found.update(repr(sequence).encode())
    return found.hexdigest()
