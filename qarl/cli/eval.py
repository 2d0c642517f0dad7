"""`qarl eval`: evaluate a run, an export or any checkpoint on held-out questions and benchmarks."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qarl.api.runs import evaluated
from qarl.cli.environment import quiet_libraries
from qarl.cli.options import DTYPES, add_count, add_json, say, write_json
from qarl.configs.errors import ConfigError
from qarl.evaluation.suites import SUITES
from qarl.report.startup import phases_shown_on
from qarl.run.evaluation_plan import EvaluationPlan, Suite, plan_evaluation, plan_same

if TYPE_CHECKING:  # because it imports numpy
    from qarl.evaluation.results import Evaluation


def add_eval(commands: Any) -> None:
    """Add `qarl eval` to the commands."""
    evaluate = commands.add_parser(
        "eval",
        help="Measure held-out accuracy of a run, an export or any checkpoint, through vLLM.",
        usage="qarl eval TARGET [OPTIONS] [--task.FIELD VALUE …] [--eval.FIELD VALUE …]",
        description=(
            "Measure held-out accuracy of a run, an export or any checkpoint, through vLLM: the"
            " fraction that the task's checker counts as correct, with a 95 % bootstrap interval"
            " over questions. Settings that are not given are the run's, which its export records."
            " Every field of task and eval is an option by its dotted name, such as --task.correct"
            " mine.py:correct."
        ),
    )
    add = evaluate.add_argument
    add(
        "target",
        metavar="TARGET",
        help="Run folder (its export), checkpoint folder, hub id, or embedded name.",
    )
    add(
        "--task",
        dest="short:task.name",
        metavar="NAME",
        help="Task name or file. Default: the run's, else chain_sum.",
    )
    suites = "; ".join(
        f"{name} ({', '.join(b.name for b in suite)})" for name, suite in SUITES.items()
    )
    add("--suite", choices=tuple(SUITES), help=f"Benchmarks instead of a task: {suites}.")
    add(
        "--data",
        metavar="DIR",
        help="Folder with local copies of the suite's benchmarks. Default: from the Hub.",
    )
    add(
        "--against",
        metavar="OTHER",
        help="Another target, or what --json wrote of one, to compare with by question.",
    )
    add_sampling(evaluate)
    for name, metavar, text in (
        (
            "problems",
            "N",
            "Number of held-out problems. Default: the run's, else 512; of a suite, all.",
        ),
        ("samples", "N", "Answers per problem. Default: the run's, else 1."),
        ("top-k", "K", "Sample answers from this many of the likeliest tokens. Default: 0, all."),
    ):
        add(
            f"--{name}",
            dest=f"short:eval.{name.replace('-', '_')}",
            metavar=metavar,
            help=text,
        )
    add(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help=(
            "Leave out problems with longer prompts. Default: the run's, else 448; of a suite,"
            " 2048."
        ),
    )
    add(
        "--dtype",
        choices=DTYPES,
        help=(
            "Compute dtype. Default: the run's, else the checkpoint's, but bfloat16 if that is"
            " float32."
        ),
    )
    add_json(evaluate, "Write all figures and the answers to every question as JSON too.")
    evaluate.set_defaults(run=_eval, fields=True)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options of `qarl eval` and `qarl sample` to a command."""
    add = parser.add_argument
    add(
        "--temperature",
        dest="short:eval.temperature",
        metavar="T",
        help="Sampling temperature. Default: the run's, else 0, greedy.",
    )
    add(
        "--top-p",
        dest="short:eval.top_p",
        metavar="P",
        help=(
            "Sample answers from the likeliest tokens that together have this probability."
            " Default: 1."
        ),
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="Upper limit on the tokens of an answer. Default: the run's, else 64.",
    )
    add_count(parser, "--seed", "Seed for problems and sampling.", 0, least=0)


def _eval(known: argparse.Namespace, console: Console) -> int:
    overrides = known.overrides
    suite = _suite(known)
    quiet_libraries()
    from qarl.evaluation.results import (
        read_evaluation,
        require_same_settings,
        write_evaluation,
    )

    with phases_shown_on(Console(stderr=True)):
        limits = known.max_new_tokens, known.max_prompt_tokens
        plan = plan_evaluation(known.target, overrides, *limits, known.dtype, suite)
        other: EvaluationPlan | Evaluation | None = None
        if known.against is not None and Path(known.against).is_file():
            other = read_evaluation(Path(known.against))
            require_same_settings(known.target, plan.settings(known.seed), other)
        elif known.against is not None:
            other = plan_same(plan, known.against, known.dtype)
        evaluation = evaluated(plan, known.seed)
        write_json(known.json, write_evaluation(evaluation))
        reference = evaluated(other, known.seed) if isinstance(other, EvaluationPlan) else other
    for line in (
        *_lines(evaluation),
        *(_compared(evaluation, reference) if reference is not None else ()),
    ):
        say(console, line)
    return 0


def _suite(known: argparse.Namespace) -> Suite | None:
    if known.suite is None:
        if known.data is not None:
            raise ConfigError(
                f"--data {known.data} goes with --suite, whose copies it holds; omit it"
            )
        return None
    for field, value in known.overrides.items():
        if field.startswith("task.") and not field.startswith(("task.system", "task.template")):
            raise ConfigError(
                f"--{field} {value} does not go with --suite {known.suite}, which has its own"
                " problems and checker; omit one of them"
            )
    if known.data is not None and not Path(known.data).is_dir():
        raise ConfigError(
            f"--data {known.data}: there is no such folder; give that with the suite's local copies"
        )
    return Suite(known.suite, None if known.data is None else Path(known.data))


def _lines(evaluation: "Evaluation") -> Iterator[str]:
    from qarl.evaluation.results import describe, percent

    settings = evaluation.settings
    how = (
        f"{settings['samples']} samples at {settings['temperature']:g}"
        if settings["temperature"]
        else "greedy"
    )
    for result in evaluation.results:
        yield f"{result.name}, {how}: {'; '.join(describe(result))}"
    if len(evaluation.results) > 1:
        yield f"mean of {len(evaluation.results)} benchmarks: {percent(evaluation.mean())}"


def _compared(evaluation: "Evaluation", reference: "Evaluation") -> Iterator[str]:
    from qarl.evaluation.results import differences, points
    from qarl.evaluation.statistics import estimate_of_means

    compared = differences(evaluation, reference)
    for name, values in compared.items():
        yield (
            f"{name}: {points(estimate_of_means([values]))} against {reference.target}, by question"
        )
    if len(compared) > 1:
        yield (
            f"mean of {len(compared)} benchmarks:"
            f" {points(estimate_of_means(list(compared.values())))}"
        )
