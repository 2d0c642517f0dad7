"""Problems → chat-templated prompts for one tokenizer, and completions → groups with rewards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from configs.errors import ConfigError
from qarl.tasks import Problem, Task, checked_score
from rollout.types import Completion, Group, Prompt


class Prompter:
    """Turns problems into prompts with the model's own chat template (or plainly, where it has none)."""

    def __init__(self, model_folder: Path, max_prompt_tokens: int):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
        self._limit = max_prompt_tokens

    @property
    def pad_token(self) -> int:
        """A token id for padding; its value never reaches a loss."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

    def prompt(self, problem: Problem) -> Prompt:
        """Raises `ConfigError` for a prompt longer than the limit."""
        ids = self._encode(problem.question)
        if len(ids) > self._limit:
            raise ConfigError(
                f"the prompt of problem {problem.id!r} has {len(ids)} tokens, above rollout.max_prompt_tokens "
                f"{self._limit}; raise the limit or change the task ({problem.question[:80]!r}…)"
            )
        return Prompt(problem.id, problem.question, tuple(ids))

    def _encode(self, question: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer(question)["input_ids"]
        chat = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def score_groups(
    task: Task,
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
) -> list[Group]:
    """One group a problem; raises `qarl.tasks.RewardError` where a reward is not a finite number."""
    groups = []
    for problem, prompt, answers in zip(problems, prompts, completions, strict=True):
        rewards = tuple(checked_score(task, problem, a.text) for a in answers)
        groups.append(Group(prompt, tuple(answers), rewards))
    return groups
