"""Held-out questions through an engine: a run's own evaluation, and `qarl eval`'s."""

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import fmean

from qarl.configs.schema.run import EvalConfig, RolloutConfig, RunConfig
from qarl.evaluation.heldout import Heldout
from qarl.evaluation.results import Evaluation, Question, Result, final_answer
from qarl.learner.processes import Processes
from qarl.report.startup import phase, say
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Completion, Sampling
from qarl.run.evaluation_plan import Plan
from qarl.run.prompts import Prompter, open_prompter, responses_of, sample
from qarl.run.session import Position, Session
from qarl.tasks import Problem, Task
from qarl.tasks.load import load_rollout
from qarl.tasks.task import rewarded


def problems_once(task: Task, count: int, seed: int) -> list[Problem]:
    """The first `count` held-out problems for this seed; each once, so fewer where a file has
    fewer.
    """
    size = task.size("heldout")
    return task.problems("heldout", 0, count if size is None else min(count, max(size, 1)), seed)


def answered(
    engine: Engine,
    task: Task,
    prompter: Prompter,
    asking: EvalConfig,
    rollout: RolloutConfig,
    seed: int = 0,
    processes: Processes | None = None,
) -> Result:
    """Answers of the policy that `engine` holds, judged by the task's checker.

    asking: how many problems and samples, and how these are drawn. rollout: what ends them. seed:
    of the problems and of sampling. processes: each asks its own engine a part, and all return the
    whole, whose answers do not depend on how many there are.
    """
    together = processes or Processes()
    problems = problems_once(task, asking.problems, seed)
    share = together.share(problems)
    sampling = Sampling.of(rollout, seed, together.span(len(problems)).start, asking)
    prompts = [prompter.prompt(problem) for problem in share]
    speaker = prompter.speaker(task.rollout, task.time_limit)
    _, completions = sample(engine, speaker, share, prompts, sampling)
    responses = responses_of(share, completions)
    rewards = task.rewards(responses) if task.checker is None else []
    verdicts = rewarded(rewards) if task.checker is None else task.correct(responses)
    starts = range(0, len(verdicts), asking.samples)
    questions = [
        _question(problem, own, verdicts[start : start + asking.samples])
        for problem, own, start in zip(share, completions, starts, strict=True)
    ]
    signals = [reward for reward in together.concatenated(rewards) if reward is not None]
    return Result(
        task.name,
        tuple(together.concatenated(questions)),
        fmean(signals) if signals else None,
    )


def heldout_of(session: Session, config: RunConfig) -> Heldout:
    """What a run's policy comes to just now, through its engine; all processes come here."""
    policy, how = session.policy, (config.eval, config.rollout)
    result = answered(
        session.engine, policy.task, policy.prompter, *how, processes=policy.processes
    )
    return Heldout(result.accuracy, result.reward)


def heldout_at_first(session: Session, config: RunConfig, at: Position) -> Heldout:
    """The same before step 1, kept in `at`."""
    with phase("evaluating before step 1"):
        first = heldout_of(session, config)
    at.first_accuracy, at.first_reward = first.accuracy, first.reward
    return first


def _question(problem: Problem, completions: list[Completion], verdicts: list[bool]) -> Question:
    return Question(
        id=problem.id,
        question=problem.question,
        reference=problem.answer,
        answers=tuple(final_answer(completion.text) for completion in completions),
        correct=tuple(verdicts),
        tokens=tuple(sum(completion.sampled) for completion in completions),
        truncated=tuple(completion.truncated for completion in completions),
    )


def evaluate(plan: Plan, tasks: Mapping[str, Task], seed: int) -> Evaluation:
    """Each task's answers, by name, from one fresh engine. seed: of the problems and of sampling.
    The reward a run trained with plays no part: accuracy is the task's own verdict.
    """
    prompter = open_prompter(plan.checkpoint, plan.rollout, plan.task)
    fitting = {name: task.shortened(prompter.fits) for name, task in tasks.items()}
    for task in fitting.values():
        if described := task.describe():
            say(described)
    results = []
    with ExitStack() as stack:
        with phase("starting the engine"):
            engine = stack.enter_context(open_engine(plan.checkpoint, plan.rollout, plan.dtype))
        for name, task in fitting.items():
            with phase(f"answering {name}"):
                result = answered(engine, task, prompter, plan.asking, plan.rollout, seed)
            results.append(dataclasses.replace(result, name=name))
    return Evaluation(
        target=plan.target,
        dtype=plan.dtype,
        settings=plan.settings(seed),
        results=tuple(results),
    )


def answers(plan: Plan, question: str, seed: int) -> list[Completion]:
    """To a single question (`qarl sample`), of the plan's checkpoint, in its chat template, behind
    the task's system prompt, by the plan's settings. Raises what `Prompter.prompt` does for a
    question that is too long, or that the model has no template for.
    """
    prompter = open_prompter(plan.checkpoint, plan.rollout, plan.task)
    problem = Problem(id="asked", question=question, answer="")
    if plan.task.system is not None:  # a question alone needs no template
        problem = problem.behind(plan.task.system)
    sampling, prompt = (
        Sampling.of(plan.rollout, seed, asking=plan.asking),
        prompter.prompt(problem),
    )
    rollout = load_rollout(plan.task.rollout) if plan.task.rollout else None
    speaker = prompter.speaker(rollout, plan.task.time_limit)
    with open_engine(plan.checkpoint, plan.rollout, plan.dtype) as engine:
        _, (completions,) = sample(engine, speaker, [problem], [prompt], sampling)
    whole = prompter.tokenizer.decode
    return [
        dataclasses.replace(c, text=whole(c.token_ids)) if c.environment else c for c in completions
    ]
