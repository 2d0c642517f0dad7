"""Engines of a policy that says what a test wants."""

from typing import Any

from qarl.rollout.types import Completion, Prompt, Sampling


class Script:
    """Whose policy says the same things in every conversation, turn by turn. asked: what it was given."""

    def __init__(self, tokenizer: Any, says: list[str]):
        self.tokenizer, self.says = tokenizer, says
        self.asked: list[Prompt] = []

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[list[Completion]]:
        self.asked += prompts
        return [[self._one(self.says[prompt.draws[2]])] for prompt in prompts if prompt.draws]

    def _one(self, says: str) -> Completion:
        tokens = tuple(self.tokenizer(says + "<|im_end|>", add_special_tokens=False)["input_ids"])
        return Completion(tokens, (0.0,) * len(tokens), says, 0, "stop")
