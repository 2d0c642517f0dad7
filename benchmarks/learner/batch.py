"""Batch of sequences of unequal lengths that `python -m benchmarks learner` trains on.

A batch is written as JSON and read by every trainer measured, so all of them see the same tokens,
rewards and sampler log-probs. This module imports neither torch nor transformers, because TRL's
worker reads it too.
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
"""Mean length of prompts over the median length of completions.

Prompt lengths vary by up to half around that mean.
"""

_SPREAD = 0.6
"""Standard deviation of the completions' log length.

The longest of 64 completions is then about four times the median.
"""


@dataclass(frozen=True)
class Sequences:
    """One batch: prompts, each with a group of `samples` completions, in order of the prompts.

    Number of sequences: B = len(prompts) * samples.
    """

    prompts: list[list[int]]
    """Token ids of each prompt."""
    samples: int
    """Completions per prompt."""
    completions: list[list[int]]
    """Token ids of each of the B completions."""
    logprobs: list[list[float]]
    """The sampler's log-probs of each completion's tokens, in nats; B entries."""
    rewards: list[float]
    """Reward of each of the B completions."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences, prompts and completions, without padding."""
        return sum(len(p) for p in self.prompts) * self.samples + sum(
            len(c) for c in self.completions
        )

    def save(self, file: Path) -> None:
        """Write the batch as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def load(file: Path) -> "Sequences":
        """Read a batch that `save` wrote."""
        return Sequences(**json.loads(file.read_text()))


def draw_sequences(model: BenchModel, seed: int) -> Sequences:
    """Draw a batch; the result depends only on the model's sizes and the seed.

    Completion lengths are log-normal, and each completion ends with the end token. Every group has
    both rewards, so every sequence contributes a gradient. Sampler log-probs are those of a nearly
    uniform policy.
    """
    draw = random.Random(f"{seed}")
    vocabulary = model.config["vocab_size"]

    def words(count: int) -> list[int]:
        return [draw.randrange(_FIRST_WORD, vocabulary) for _ in range(count)]

    half = max(1, round(model.tokens * _PROMPT_SHARE))
    shortest = max(1, half // 2)
    longest = half + half // 2
    prompts = [words(draw.randint(shortest, longest)) for _ in range(model.prompts)]
    count = model.prompts * model.samples
    factors = [math.exp(draw.gauss(0, _SPREAD)) for _ in range(count)]
    drawn = [round(model.tokens * factor) for factor in factors]
    lengths = [min(max(length, 2), 8 * model.tokens) for length in drawn]
    completions = [[*words(length - 1), END] for length in lengths]
    uniform = -math.log(vocabulary)
    logprobs = [[uniform + draw.gauss(0, 0.01) for _ in tokens] for tokens in completions]
    rewards = [float(i % model.samples < model.samples // 2) for i in range(count)]
    return Sequences(
        prompts=prompts,
        samples=model.samples,
        completions=completions,
        logprobs=logprobs,
        rewards=rewards,
    )


def digest(sequences: Iterable[Sequence[int]]) -> str:
    """Return the SHA-256 of the sequences, regardless of their order.

    With it a trainer proves which sequences it trained on.
    """
    sha256 = hashlib.sha256()
    for sequence in sorted(tuple(int(token) for token in tokens) for tokens in sequences):
        sha256.update(repr(sequence).encode())
    return sha256.hexdigest()
