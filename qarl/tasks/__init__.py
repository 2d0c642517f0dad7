"""Verifiable tasks: sources of prompts, and functions that score completions.

This package imports neither torch nor vLLM.
"""

from qarl.tasks.base import (
    Problem,
    Response,
    RewardError,
    Split,
    TaskError,
    is_heldout,
    solution_of,
)
from qarl.tasks.load import load_task
from qarl.tasks.procedural import DEFAULT_OPTIONS, ReasoningGymTask
from qarl.tasks.rewards import exact_answer, exact_reward, short_reward
from qarl.tasks.table import Table
from qarl.tasks.task import Task

__all__ = [
    "DEFAULT_OPTIONS",
    "Problem",
    "ReasoningGymTask",
    "Response",
    "RewardError",
    "Split",
    "Table",
    "Task",
    "TaskError",
    "exact_answer",
    "exact_reward",
    "is_heldout",
    "load_task",
    "short_reward",
    "solution_of",
]
