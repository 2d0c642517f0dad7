"""Questions that a policy answers rightly now and then (`qarl eval --perfectible`).

A policy that solves a question sometimes can learn to solve it always: a run on such questions that does not come to
95 % has a fault ("Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788, section 3.2).
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.evaluation.results import Result
from qarl.report.startup import phase
from qarl.rollout.open import open_engine
from qarl.run.evaluate import answered, problems_once
from qarl.run.evaluation_plan import Plan
from qarl.run.prompts import open_prompter
from qarl.tasks import Problem


@dataclass(frozen=True)
class Sifted:
    """questions: how many. below, above: those solved less often and more often than wanted. kept: lines written."""

    questions: int
    below: int
    above: int
    kept: int


def write_perfectible(plan: Plan, seed: int, low: float, high: float, file: Path) -> Sifted:
    """Ask the training questions of `plan`'s task, and write those of which a share from `low` to `high` of the answers
    is right, as a file of questions. Raises `TaskError` where the task has none."""
    (task,) = plan.tasks().values()
    prompter = open_prompter(plan.checkpoint, plan.rollout, plan.task)
    task = task.shortened(prompter.fits)
    problems = problems_once(task, "train", plan.asking.problems, seed)
    with ExitStack() as stack:
        with phase("starting the engine"):
            engine = stack.enter_context(open_engine(plan.checkpoint, plan.rollout, plan.dtype))
        with phase(f"answering {len(problems)} questions, {plan.asking.samples} times each"):
            result = answered(engine, task, prompter, plan.asking, plan.rollout, seed, split="train")
    lines = sifted_lines(problems, result, low, high)
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    shares = result.shares()
    return Sifted(len(shares), sum(s < low for s in shares), sum(s > high for s in shares), len(lines))


def sifted_lines(problems: Sequence[Problem], result: Result, low: float, high: float) -> list[dict[str, Any]]:
    """Lines of a file of questions: the question, or the whole chat, its answer, and the share of answers that were
    right as `solved`; other columns stay."""
    solved = zip(problems, result.shares(), strict=True)
    return [
        {
            **problem.metadata,
            "question": list(problem.messages) or problem.question,
            "answer": problem.answer,
            "split": "train",
            "solved": share,
        }
        for problem, share in solved
        if low <= share <= high
    ]
