"""One short file per algorithm; `OBJECTIVES` is the switch."""

from learner.objectives.base import Objective, ObjectiveInput, ObjectiveResult
from learner.objectives.grpo import grpo
from learner.objectives.tbpo import tbpo

OBJECTIVES: dict[str, Objective] = {"tbpo": tbpo, "grpo": grpo}

__all__ = ["OBJECTIVES", "Objective", "ObjectiveInput", "ObjectiveResult"]
