"""Verifiable tasks: where prompts come from, how completions are scored. Imports neither torch nor vLLM."""

from qarl.tasks.base import (
    Problem,
    RewardError,
    Split,
    Task,
    TaskError,
    checked_score,
    exact_reward,
    is_heldout,
    short_reward,
    solution_of,
)
from qarl.tasks.jsonl import JsonlTask
from qarl.tasks.load import RewardedTask, load_task
from qarl.tasks.procedural import DEFAULT_OPTIONS, ReasoningGymTask

__all__ = [
    "DEFAULT_OPTIONS",
    "JsonlTask",
    "Problem",
    "ReasoningGymTask",
    "RewardError",
    "RewardedTask",
    "Split",
    "Task",
    "TaskError",
    "checked_score",
    "exact_reward",
    "is_heldout",
    "load_task",
    "short_reward",
    "solution_of",
]
