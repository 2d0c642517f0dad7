"""Engines whose policy says what a test wants."""

import random
from collections.abc import Sequence
from typing import Any

from qarl.rollout.types import Completion, Prompt, Sampling


class Script:
    """Engine whose policy says the same texts in every conversation, turn by turn.

    `asked` lists its inputs.
    """

    def __init__(self, tokenizer: Any, says: list[str]):
        self.tokenizer = tokenizer
        self.says = says
        self.asked: list[Prompt] = []

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[list[Completion]]:
        self.asked += prompts
        turns = [prompt.draws[2] for prompt in prompts if prompt.draws]
        return [[self._one(self.says[turn])] for turn in turns]

    def _one(self, says: str) -> Completion:
        tokens = tuple(self.tokenizer(says + "<|im_end|>", add_special_tokens=False)["input_ids"])
        return Completion(tokens, (0.0,) * len(tokens), says, 0, "stop")


class Sampler:
    """Engine whose policy says random tokens, which depend only on the request.

    It ends with `pieces`, each of several tokens. `asked` lists all requests and answers.
    """

    def __init__(self, vocabulary: int, pieces: Sequence[Sequence[int]] = ()):
        self.vocabulary = vocabulary
        self.pieces = pieces
        self.asked: list[tuple[Prompt, Completion]] = []

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[list[Completion]]:
        return [[self._one(prompt, sampling)] for prompt in prompts]

    def _one(self, prompt: Prompt, sampling: Sampling) -> Completion:
        assert sampling.samples == 1
        assert prompt.draws is not None
        assert prompt.max_new_tokens is not None
        chance = random.Random(str((prompt.token_ids, prompt.draws)))
        said = chance.choices(self.pieces, k=chance.randint(1, 4)) if self.pieces else []
        drawn = [
            chance.randrange(self.vocabulary) for _ in range(chance.randint(not self.pieces, 6))
        ]
        tokens = tuple(
            [*drawn, *(token for piece in said for token in piece)][: prompt.max_new_tokens]
        )
        answer = Completion(
            token_ids=tokens,
            logprobs=tuple(-chance.random() for _ in tokens),
            text="",
            weight_version=3,
            finish_reason="length" if len(tokens) == prompt.max_new_tokens else "stop",
        )
        self.asked.append((prompt, answer))
        return answer
