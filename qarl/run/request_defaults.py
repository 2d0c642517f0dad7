"""How a run asks its policy: the record that belongs to an export."""

from collections.abc import Sequence
from typing import Any

from qarl.configs.schema.run import RunConfig
from qarl.rollout.types import RequestDefaults, Sampling
from qarl.tasks import Problem, Task

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def request_defaults(
    config: RunConfig, tokenizer: Any, problems: Sequence[Problem]
) -> RequestDefaults:
    """Return how a run asks its policy in training and evaluation.

    tokenizer: the model's tokenizer. problems: the problems that are asked; a system prompt counts
    if all of them begin with it, whether it is the task's or their own.
    """
    chat = tokenizer.chat_template is not None
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    sampling = Sampling.of(config.rollout, 0, evaluation=config.eval).with_stop_tokens(tokenizer)
    return RequestDefaults(
        chat=chat,
        system=common_system(problems) if chat else None,
        template=config.task.model_dump(mode="json", include={"template"})["template"],
        end_tokens=(*end, *sampling.stop_tokens),
        stop=sampling.stop,
        loop_limit=config.rollout.loop_limit,
        sampling={name: getattr(config.eval, name) for name in _SAMPLING},
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def all_problems(task: Task) -> list[Problem]:
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
    systems = {system_of(problem) for problem in problems}
    return systems.pop() if len(systems) == 1 else None
