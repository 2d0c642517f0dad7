"""Builds a task from its configuration."""

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qarl.configs.functions import FunctionKind, load_function
from qarl.configs.schema.task import VERIFIERS, TaskConfig
from qarl.tasks.base import Response, Scorer, Source, TaskError
from qarl.tasks.environments import open_environments
from qarl.tasks.math import INSTRUCTION, math_checker, math_scorer
from qarl.tasks.procedural import ReasoningGymTask
from qarl.tasks.rewards import each, exact_answer, no_signal
from qarl.tasks.rows import HUB, file_rows, hub_rows, is_table, short_name
from qarl.tasks.scorers import checker_of, judges_alone, reward_of, tolerant
from qarl.tasks.signatures import is_async
from qarl.tasks.table import Columns, Table, make_table
from qarl.tasks.task import Task
from qarl.tasks.verifiers import open_verifiers

MATH = "math"
_ROLLOUT = "taking (policy, problem): async def rollout(policy, problem)"
_PAPER = "hf:Elliott/Openr1-Math-46k-8192"
_PAPER_COLUMNS = Columns("prompt", "reward_model.ground_truth")
"""Columns of OpenR1-Math-46K, in verl's format.

The paper trains on this data set of Yan et al. 2025 (arXiv 2504.14945).
"""


def load_task(config: TaskConfig) -> Task:
    """Return the task that `config` describes.

    It is a reasoning-gym data set, a person's questions, the paper's mathematics, or an environment
    of verifiers.

    Raises:
        TaskError: A name or option is unknown or does not apply, rows are unusable, or a reward or
            checker cannot be loaded.
    """
    if config.name.startswith(VERIFIERS):
        return _verifiers_task(config)
    judged = False
    if config.environment:
        judged = open_environments(config.environment, config.time_limit).judges
    if judged and config.reward is not None:
        raise TaskError(
            f"task.reward {config.reward!r} and get_reward of environment {config.environment!r}"
            " both give rewards; omit one of them"
        )
    name = short_name(config.name)
    own_reward = no_signal if judged else None
    # Load the reward before the rows, so that its faults are reported first.
    if config.reward is not None:
        scorer = reward_of(config.reward, name, config.time_limit, config.memory_limit)
        own_reward = tolerant(scorer, config.on_error)
    source, reward, checker = _source(config, judged or judges_alone(config.reward))
    if config.correct is not None:
        checker = checker_of(config.correct, name, config.time_limit, config.memory_limit)
    elif isinstance(source, Table) and source.columns.answer is None:
        checker = None
    return Task(
        source=source,
        reward=own_reward or reward,
        checker=checker,
        system=config.system,
        template=config.template,
        rollout=load_rollout(config.rollout) if config.rollout else None,
        time_limit=config.time_limit,
        judges={"reward": config.reward, "checker": config.correct},
    )


def _verifiers_task(config: TaskConfig) -> Task:
    row_options = ("data", "prompt", "answer", "subset", "split", "heldout")
    for field in ("reward", "rollout", "environment", "system", *row_options):
        value = getattr(config, field)
        if value is not None:
            raise TaskError(
                f"task.{field} {value!r} is not for {config.name!r}, which brings its own; omit it"
            )
    options = json.dumps(config.options, sort_keys=True)
    host = open_verifiers(config.name, options, config.time_limit)
    checker = None
    if config.correct is not None:
        checker = checker_of(config.correct, config.name, config.time_limit, config.memory_limit)
    return Task(
        source=host.table(),
        reward=no_signal,
        checker=checker,
        template=config.template,
        rollout=host.rollout,
        time_limit=None,
    )


def load_rollout(spec: str) -> Callable[..., Any]:
    """Load the function that `spec` names.

    Raises `TaskError` if it is missing, is not async, or takes other arguments.
    """
    function = load_function(FunctionKind("rollout", _ROLLOUT, TaskError), spec)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise TaskError(
            f"rollout {spec!r} cannot be called: {error}; it must be one {_ROLLOUT}"
        ) from error
    if not is_async(function):
        raise TaskError(
            f"rollout {spec!r} must be an async function, {_ROLLOUT}; or a partial, a method or an"
            " instance of one, or a wrapper by functools.wraps"
        )
    return function


def _source(config: TaskConfig, judged: bool) -> tuple[Source, Scorer, Scorer | None]:
    """Return the source of problems, with the reward and checker that apply by default.

    judged: whether a person's code judges responses, so that rows need no answers.
    """
    if config.name != MATH:
        _refuse(config, ("data",), "is where task math has its problems")
    if config.name == MATH or is_table(config.name):
        if config.options:
            raise TaskError(
                f"task {config.name!r} takes no options, got: {', '.join(config.options)}"
            )
        if config.name == MATH:
            usual = Columns("problem", "answer") if config.data else _PAPER_COLUMNS
            table = _table(config, config.data or _PAPER, usual, judged)
            # Without a system prompt, text questions get the instruction to box the answer.
            if config.system is None:
                table = table.with_system_prompt(INSTRUCTION)
            return table, math_scorer(), math_checker()
        table = _table(config, config.name, Columns(), judged)
        # The same function rewards and checks: an answer in a box is right, and is rewarded.
        return table, each(exact_answer), each(exact_answer)
    part_options = ("prompt", "answer", "subset", "split", "heldout")
    _refuse(config, part_options, "names part of a file or data set")
    built_in = ReasoningGymTask(config.name, config.options)
    scores = built_in.scorer()

    def is_right(responses: Sequence[Response]) -> list[bool]:
        return [score == 1.0 for score in scores(responses)]

    return built_in, scores, is_right


def _table(config: TaskConfig, name: str, usual: Columns, judged: bool) -> Table:
    """Load the rows of a file or data set.

    Args:
        usual: Columns that apply if the configuration names none.
        judged: See `_source`.
    """
    if name.startswith(HUB):
        rows = hub_rows(name, config.subset, config.split or "train", config.heldout)
    elif is_table(name):
        hub_options = ("subset", "split", "heldout")
        _refuse(config, hub_options, "names part of a Hugging Face data set (hf:…)")
        rows = file_rows(Path(name))
    else:
        raise TaskError(
            f"task.data {name!r} must be a .jsonl, .csv, .tsv or .parquet file, or hf:DATASET"
        )
    present = rows[0].values if rows else {}
    missing = None
    if config.prompt is None and usual.prompt not in present and "prompt" in present:
        missing = usual.prompt
    prompt = config.prompt or ("prompt" if missing else usual.prompt)
    answer = config.answer or usual.answer
    if judged and config.answer is None:
        outer = f"{usual.answer}".split(".")[0]  # of a nested column such as "a.b"
        if not any(outer in row.values for row in rows):
            answer = None
    return make_table(name, rows, Columns(prompt, answer, missing))


def _refuse(config: TaskConfig, fields: tuple[str, ...], why: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is not None:
            raise TaskError(
                f"task.{field} {value!r} {why}; task {config.name!r} is not one: omit it"
            )
