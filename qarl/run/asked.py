"""How a run asks its policy: the record that belongs to an export."""

from collections.abc import Sequence
from typing import Any

from qarl.configs.schema.run import RunConfig
from qarl.rollout.vllm.requests import loop_detection
from qarl.sync.asked import Asked
from qarl.tasks import Problem, Task

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def asked_of(config: RunConfig, tokenizer: Any, problems: Sequence[Problem]) -> Asked:
    """Return how a run asks its policy in training and evaluation.

    tokenizer: the model's tokenizer. problems: the problems that are asked; a system prompt counts
    if all of them begin with it, whether it is the task's or their own.
    """
    chat = tokenizer.chat_template is not None
    return Asked(
        chat=chat,
        system=common_system(problems) if chat else None,
        template=config.task.model_dump(mode="json", include={"template"})["template"],
        end_token=tokenizer.eos_token_id,
        stop=config.rollout.stop,
        loop_limit=config.rollout.loop_limit,
        sampling={name: getattr(config.eval, name) for name in _SAMPLING},
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def asked_problems(task: Task) -> list[Problem]:
    """Return every problem of a table, or one of each split of an endless task."""
    problems: list[Problem] = []
    for split in ("train", "heldout"):
        size = task.size(split)
        if size != 0:
            problems += task.problems(split, 0, size or 1, seed=0)
    return problems


def system_of(problem: Problem) -> str | None:
    """Return the system prompt that a problem begins with, or None."""
    first = problem.chat[0]
    return first["content"] if first["role"] == "system" else None


def common_system(problems: Sequence[Problem]) -> str | None:
    """Return the system prompt that all problems begin with; None if they differ or have none."""
    found = {system_of(problem) for problem in problems}
    return found.pop() if len(found) == 1 else None


def request_fields(asked: Asked) -> dict[str, Any]:
    """Return the fields that a request has to carry because no file of an export can say them.

    A greedy evaluation's temperature is one, because a generation config cannot hold 0. A request
    that is no chat has a limit, because OpenAI's API gives it 16 tokens otherwise.
    """
    fields: dict[str, Any] = {"temperature": 0} if asked.greedy else {}
    if not asked.chat:
        fields["max_tokens"] = asked.max_new_tokens
    if asked.stop:
        fields["stop"] = list(asked.stop)
    if asked.loop_limit is not None:
        fields["repetition_detection"] = loop_detection(asked.loop_limit)
    return fields
