"""From the configuration's words to a task."""

from typing import Any, cast

from configs.functions import FunctionKind, load_function
from qarl.tasks.base import Problem, Reward, Split, Task, TaskError
from qarl.tasks.jsonl import JsonlTask
from qarl.tasks.procedural import ReasoningGymTask

_REWARD = FunctionKind("reward", "taking (problem, text) and returning a number", TaskError)


class RewardedTask:
    """A task whose score is a user's function; problems and `correct` stay the task's own."""

    def __init__(self, task: Task, reward: Reward) -> None:
        self.name = task.name
        self._task = task
        self._reward = reward

    def problems(self, split: Split, start: int, count: int, seed: int) -> list[Problem]:
        """The inner task's problems."""
        return self._task.problems(split, start, count, seed)

    def score(self, problem: Problem, text: str) -> float:
        """The user's reward, as returned; `checked_score` is what checks it."""
        return self._reward(problem, text)

    def correct(self, problem: Problem, text: str) -> bool:
        """The inner task's verdict, so that accuracy means the same under every reward."""
        return self._task.correct(problem, text)


def load_task(name: str, options: dict[str, Any], reward: str | None = None) -> Task:
    """The task called `name`: a path ending in .jsonl, or a reasoning-gym dataset with `options`.

    Args:
        name: for example "chain_sum" or "data/questions.jsonl".
        options: fields of the dataset's config, e.g. {"max_terms": 3}; must be empty for a file.
        reward: "file.py:function" or "package.module:function" with signature (problem, text) -> float, replacing the
            score.

    Raises:
        TaskError: unknown name or option, an unreadable file, or a reward that cannot be imported.
    """
    if name.endswith(".jsonl") and options:
        raise TaskError(f"task {name!r} is a file and takes no options, got: {', '.join(options)}")
    task: Task = JsonlTask(name) if name.endswith(".jsonl") else ReasoningGymTask(name, options)
    return task if reward is None else RewardedTask(task, load_reward(reward))


def load_reward(spec: str) -> Reward:
    """The function that `spec` names, "file.py:function" or "package.module:function". Raises `TaskError`."""
    return cast(Reward, load_function(_REWARD, spec))
