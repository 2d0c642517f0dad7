"""A single question to a policy (`qarl sample`)."""

from qarl.rollout.open import open_engine
from qarl.rollout.types import Completion, Sampling
from qarl.run.evaluation_plan import Plan
from qarl.run.prompts import open_prompter
from qarl.tasks import Problem


def answers(plan: Plan, question: str, seed: int) -> list[Completion]:
    """Of the plan's checkpoint, in its chat template, behind the task's system prompt, by the plan's settings. Raises
    what `Prompter.prompt` does for a question that is too long, or that the model has no template for."""
    prompter = open_prompter(plan.checkpoint, plan.rollout, plan.task)
    problem = Problem(id="asked", question=question, answer="")
    if plan.task.system is not None:  # a question alone needs no template
        problem = problem.behind(plan.task.system)
    with open_engine(plan.checkpoint, plan.rollout, plan.dtype) as engine:
        return engine.generate([prompter.prompt(problem)], Sampling.of(plan.rollout, seed, asking=plan.asking))[0]
