"""Single questions to a policy, and conversations with one (`qarl sample`, `qarl chat`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from qarl.rollout.open import open_engine
from qarl.rollout.types import Completion, Sampling
from qarl.run.evaluation_plan import Plan
from qarl.run.prompts import open_prompter
from qarl.tasks import Problem
from qarl.tasks.base import Message

Answer = Callable[[Sequence[Message], int], list[Completion]]
"""A conversation that ends with the user's turn, and a seed → completions."""


@contextmanager
def open_policy_to_ask(plan: Plan) -> Iterator[Answer]:
    """Answers of the plan's checkpoint, in its chat template, behind the task's system prompt, by the plan's settings.

    Raises what `Prompter.prompt` does for a conversation that is too long, or that the model has no template for.
    """
    prompter = open_prompter(plan.checkpoint, plan.rollout, plan.task)
    system = () if plan.task.system is None else ({"role": "system", "content": plan.task.system},)
    with open_engine(plan.checkpoint, plan.rollout, plan.dtype) as engine:

        def answer(turns: Sequence[Message], seed: int) -> list[Completion]:
            messages = (*system, *turns)
            problem = Problem(
                id="asked",
                question=turns[-1]["content"],
                answer="",
                messages=messages if len(messages) > 1 else (),  # a single question needs no template
            )
            return engine.generate([prompter.prompt(problem)], Sampling.of(plan.rollout, seed, asking=plan.asking))[0]

        yield answer
