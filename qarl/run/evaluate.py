"""Held-out questions answered by an engine, for a run's own evaluation and for `qarl eval`."""

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import fmean

from qarl.configs.schema.rollout import RolloutConfig
from qarl.configs.schema.run import EvalConfig, RunConfig
from qarl.evaluation.heldout import Heldout
from qarl.evaluation.results import Evaluation, Question, Result, final_answer
from qarl.learner.processes import Processes
from qarl.report.startup import phase, say
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Completion, Sampling
from qarl.run.evaluation_plan import EvaluationPlan
from qarl.run.prompts import Prompter, open_prompter, responses_of, sample
from qarl.run.session import Position, Session
from qarl.tasks import Problem, Task
from qarl.tasks.load import load_rollout
from qarl.tasks.task import rewarded


def evaluate_before_training(session: Session, config: RunConfig, position: Position) -> Heldout:
    """Return held-out accuracy and reward before step 1, and store them in the position."""
    with phase("evaluating before step 1"):
        first = evaluate_heldout(session, config)
    position.first_accuracy = first.accuracy
    position.first_reward = first.reward
    return first


def evaluate_heldout(session: Session, config: RunConfig) -> Heldout:
    """Return held-out accuracy and reward of a run's current policy, through its engine.

    Collective: every process must call this.
    """
    policy = session.policy
    result = evaluate_task(
        session.engine,
        policy.task,
        policy.prompter,
        config.eval,
        config.rollout,
        processes=policy.processes,
    )
    return Heldout(result.accuracy, result.reward)


def evaluate(plan: EvaluationPlan, tasks: Mapping[str, Task], seed: int) -> Evaluation:
    """Evaluate each task, by name, with one fresh engine.

    Accuracy is the task's own verdict; the reward that a run trained with plays no part. seed: seed
    of problems and sampling.
    """
    prompter = open_prompter(plan.checkpoint, plan.rollout, plan.task)
    fitting = {name: task.without_long_prompts(prompter.fits) for name, task in tasks.items()}
    for task in fitting.values():
        if described := task.describe():
            say(described)
    results = []
    with ExitStack() as stack:
        with phase("starting the engine"):
            engine = stack.enter_context(open_engine(plan.checkpoint, plan.rollout, plan.dtype))
        for name, task in fitting.items():
            with phase(f"answering {name}"):
                result = evaluate_task(engine, task, prompter, plan.evaluation, plan.rollout, seed)
            results.append(dataclasses.replace(result, name=name))
    return Evaluation(
        target=plan.target,
        dtype=plan.dtype,
        settings=plan.settings(seed),
        results=tuple(results),
    )


def evaluate_task(
    engine: SamplingEngine,
    task: Task,
    prompter: Prompter,
    evaluation: EvalConfig,
    rollout: RolloutConfig,
    seed: int = 0,
    processes: Processes | None = None,
) -> Result:
    """Ask the policy that `engine` holds a task's held-out questions, and judge its answers.

    evaluation: number of problems and samples, and sampling settings. rollout: length limits and
    stop texts. seed: seed of problems and sampling. processes: each asks its own engine a share of
    the questions, and all return the answers to all; these do not depend on the number of
    processes.
    """
    processes = processes or Processes()
    problems = problems_once(task, evaluation.problems, seed)
    share = processes.share(problems)
    sampling = Sampling.of(rollout, seed, processes.span(len(problems)).start, evaluation)
    prompts = [prompter.prompt(problem) for problem in share]
    speaker = prompter.speaker(task.rollout, task.time_limit)
    _, completions = sample(engine, speaker, share, prompts, sampling)
    responses = responses_of(share, completions)
    rewards = task.rewards(responses) if task.checker is None else []
    verdicts = rewarded(rewards) if task.checker is None else task.correct(responses)
    starts = range(0, len(verdicts), evaluation.samples)
    questions = [
        _question(problem, own, verdicts[start : start + evaluation.samples])
        for problem, own, start in zip(share, completions, starts, strict=True)
    ]
    signals = [reward for reward in processes.concatenated(rewards) if reward is not None]
    return Result(
        task.name,
        tuple(processes.concatenated(questions)),
        fmean(signals) if signals else None,
    )


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


def problems_once(task: Task, count: int, seed: int) -> list[Problem]:
    """Return the first `count` held-out problems for this seed, each once.

    If the task's file has fewer problems, fewer are returned.
    """
    size = task.size("heldout")
    if size is not None:
        count = min(count, max(size, 1))
    return task.problems("heldout", 0, count, seed)


def answers(plan: EvaluationPlan, question: str, seed: int) -> list[Completion]:
    """Return answers of the plan's checkpoint to a single question (`qarl sample`).

    The question is put in the model's chat template, after the task's system prompt, and sampled
    with the plan's settings. Raises what `Prompter.prompt` raises if the question is too long or
    the model has no template for it.
    """
    prompter = open_prompter(plan.checkpoint, plan.rollout, plan.task)
    problem = Problem(id="asked", question=question, answer="")
    if plan.task.system is not None:  # a question alone needs no template
        problem = problem.with_system_prompt(plan.task.system)
    sampling = Sampling.of(plan.rollout, seed, evaluation=plan.evaluation)
    prompt = prompter.prompt(problem)
    rollout = load_rollout(plan.task.rollout) if plan.task.rollout else None
    speaker = prompter.speaker(rollout, plan.task.time_limit)
    with open_engine(plan.checkpoint, plan.rollout, plan.dtype) as engine:
        _, (completions,) = sample(engine, speaker, [problem], [prompt], sampling)
    # A conversation's text is that of its last turn; decode all tokens to show the whole of it.
    decode = prompter.tokenizer.decode
    return [
        dataclasses.replace(c, text=decode(c.token_ids)) if c.environment else c
        for c in completions
    ]
