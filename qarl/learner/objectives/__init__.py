"""The objectives, a file for each family. `find_objective` selects one by
`learner.objective.name`.
"""

from typing import Any

from qarl.learner.objectives.base import Objective, ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.own import own
from qarl.learner.objectives.ppo import (
    dual_clip,
    grpo,
    gspo,
    gspo_dual_clip,
    positive_grpo,
)
from qarl.learner.objectives.reinforce import cispo, on_policy, pg_seq_is
from qarl.learner.objectives.sapo import sapo
from qarl.learner.objectives.tbpo import tbpo

OBJECTIVES: dict[str, Objective] = {
    "tbpo": tbpo,
    "grpo": grpo,
    "positive_grpo": positive_grpo,
    "dapo": grpo,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "gspo_dual_clip": gspo_dual_clip,
    "sapo": sapo,
    "cispo": cispo,
    "on_policy": on_policy,
    "pg_seq_is": pg_seq_is,
}
"""All objectives by name, except `own`, which is a function that the user's configuration names."""


def find_objective(section: Any) -> Objective:
    """Return the function of a section of `configs.schema.objectives`.

    Raises `ConfigError` if the section is `own` and its function is not found.
    """
    return own(section.function) if section.name == "own" else OBJECTIVES[section.name]


__all__ = [
    "OBJECTIVES",
    "Objective",
    "ObjectiveInput",
    "ObjectiveResult",
    "find_objective",
]
