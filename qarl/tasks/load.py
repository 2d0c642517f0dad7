"""From the configuration's words to a task."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qarl.configs.functions import FunctionKind, load_function
from qarl.configs.schema.task import VERIFIERS, TaskConfig
from qarl.tasks.base import Scorer, Source, TaskError
from qarl.tasks.environments import open_environments
from qarl.tasks.math import INSTRUCTION, math_checker, math_scorer
from qarl.tasks.procedural import ReasoningGymTask
from qarl.tasks.rewards import each, exact_answer, no_signal
from qarl.tasks.rows import HUB, file_rows, hub_rows, is_table, short_name
from qarl.tasks.scorers import checker_of, reward_of, tolerant
from qarl.tasks.table import Columns, Table, make_table
from qarl.tasks.task import Task
from qarl.tasks.verifiers import open_verifiers

MATH = "math"
_ROLLOUT = "taking (policy, problem): async def rollout(policy, problem)"
_PAPER = "hf:Elliott/Openr1-Math-46k-8192"
_PAPER_COLUMNS = Columns("prompt", "reward_model.ground_truth")
"""OpenR1-Math-46K of Yan et al. 2025 (arXiv 2504.14945), which the paper trains on, in verl's
columns.
"""


def load_task(config: TaskConfig) -> Task:
    """The task that `config` describes: a reasoning-gym data set, a person's questions, or the
    paper's mathematics.

    Raises:
        TaskError: an unknown name or option, one that does not apply, rows that cannot be used, or
        a reward or checker
            that cannot be loaded.
    """
    if config.name.startswith(VERIFIERS):
        return _of_verifiers(config)
    limits = config.time_limit, config.memory_limit
    judged = (
        bool(config.environment) and open_environments(config.environment, config.time_limit).judges
    )
    if judged and config.reward is not None:
        raise TaskError(
            f"task.reward {config.reward!r} and get_reward of environment {config.environment!r}"
            " both give rewards; leave one of them out"
        )
    shown, own = short_name(config.name), no_signal if judged else None
    if config.reward is not None:  # whose faults are said before the rows'
        own = tolerant(reward_of(config.reward, shown, *limits), config.on_error)
    source, reward, checker = _source(config, judged or ":" in f"{config.reward}")
    reward = own or reward
    if config.correct is not None:
        checker = checker_of(config.correct, shown, *limits)
    elif isinstance(source, Table) and source.columns.answer is None:
        checker = None
    return Task(
        source=source,
        reward=reward,
        checker=checker,
        system=config.system,
        template=config.template,
        rollout=load_rollout(config.rollout) if config.rollout else None,
        time_limit=config.time_limit,
        judges={"reward": config.reward, "checker": config.correct},
    )


def _of_verifiers(config: TaskConfig) -> Task:
    of_rows = ("data", "prompt", "answer", "subset", "split", "heldout")
    for field in ("reward", "rollout", "environment", "system", *of_rows):
        if (value := getattr(config, field)) is not None:
            raise TaskError(
                f"task.{field} {value!r} is not for {config.name!r}, which brings its own; leave"
                " it out"
            )
    host = open_verifiers(
        config.name, json.dumps(config.options, sort_keys=True), config.time_limit
    )
    limits = config.time_limit, config.memory_limit
    checker = None if config.correct is None else checker_of(config.correct, config.name, *limits)
    return Task(
        source=host.table(),
        reward=no_signal,
        checker=checker,
        template=config.template,
        rollout=host.rollout,
        time_limit=None,
    )


def load_rollout(spec: str) -> Callable[..., Any]:
    """The function that `spec` names. Raises `TaskError` for one that is missing, not async or
    takes something else.
    """
    function = load_function(FunctionKind("rollout", _ROLLOUT, TaskError), spec)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise TaskError(
            f"rollout {spec!r} cannot be called: {error}; it must be one {_ROLLOUT}"
        ) from error
    if not inspect.iscoroutinefunction(function):
        raise TaskError(f"rollout {spec!r} must be an async function, {_ROLLOUT}")
    return function


def _source(config: TaskConfig, judged: bool) -> tuple[Source, Scorer, Scorer | None]:
    """Where problems come from, and what rewards and judges responses where the configuration names
    nothing else. judged: by a person's code, so that rows of a file or data set need no answers.
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
            # What is text stands behind the instruction to box its answer, unless there is a system
            # prompt.
            return (
                table if config.system is not None else table.behind(INSTRUCTION),
                math_scorer(),
                math_checker(),
            )
        # The checker is the reward too: an answer in a box is right, and is rewarded.
        return (
            _table(config, config.name, Columns(), judged),
            each(exact_answer),
            each(exact_answer),
        )
    _refuse(
        config,
        ("prompt", "answer", "subset", "split", "heldout"),
        "names part of a file or data set",
    )
    built_in = ReasoningGymTask(config.name, config.options)
    scores = built_in.scorer()
    return (
        built_in,
        scores,
        lambda responses: [score == 1.0 for score in scores(responses)],
    )


def _table(config: TaskConfig, name: str, usual: Columns, judged: bool) -> Table:
    """usual: the columns where the configuration names none. judged: see `_source`."""
    if name.startswith(HUB):
        rows = hub_rows(name, config.subset, config.split or "train", config.heldout)
    elif is_table(name):
        _refuse(
            config,
            ("subset", "split", "heldout"),
            "names part of a Hugging Face data set (hf:…)",
        )
        rows = file_rows(Path(name))
    else:
        raise TaskError(
            f"task.data {name!r} must be a .jsonl, .csv, .tsv or .parquet file, or hf:DATASET"
        )
    there = rows[0].values if rows else {}
    missing = (
        usual.prompt
        if config.prompt is None and usual.prompt not in there and "prompt" in there
        else None
    )
    prompt = config.prompt or ("prompt" if missing else usual.prompt)
    bare = (
        judged
        and config.answer is None
        and not any(f"{usual.answer}".split(".")[0] in row.values for row in rows)
    )
    return make_table(
        name,
        rows,
        Columns(prompt, None if bare else config.answer or usual.answer, missing),
    )


def _refuse(config: TaskConfig, fields: tuple[str, ...], why: str) -> None:
    for field in fields:
        if (value := getattr(config, field)) is not None:
            raise TaskError(
                f"task.{field} {value!r} {why}; task {config.name!r} is none: leave it out"
            )
