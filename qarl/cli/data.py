"""`qarl data`: files of questions made from others."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import dotted_overrides
from qarl.configs.errors import ConfigError
from qarl.configs.load import overridden
from qarl.report.run_folder import RunFolder
from qarl.report.startup import told_to
from qarl.run.check import check_new_folder
from qarl.run.evaluation_plan import plan_evaluation
from qarl.tasks.paths import PERFECTIBLE


def add_data(commands: Any) -> None:
    """Add `qarl data` to the commands."""
    data = commands.add_parser("data", help="questions that a policy solves now and then, to test a set-up with")
    names = data.add_subparsers(title="files", required=True, metavar="NAME")
    perfectible = names.add_parser(
        "perfectible",
        help="training questions that a policy solves now and then",
        usage="qarl data perfectible TARGET [OPTIONS] [--task.FIELD VALUE …]",
        description="Ask a policy the training questions of a task, several times each, and write those it solves now "
        "and then. A run on them that does not come to 95 % has too few steps, or a fault: its report says which it "
        "came to. What is not given is the run's, where TARGET is one.",
        allow_abbrev=False,
    )
    add = perfectible.add_argument
    add("target", metavar="TARGET", help="run folder (its export), checkpoint folder, hub id, or embedded name")
    add("-o", "--output", default=PERFECTIBLE, metavar="FILE", help=f"to write; its name ends in {PERFECTIBLE}")
    add("--task", help="task name or file (default: the run's, else chain_sum)")
    add("--problems", type=int, default=512, metavar="N", help="questions to ask (default 512)")
    add("--samples", type=int, default=40, metavar="N", help="answers to each (default 40)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of the answers (default 1)")
    add("--low", type=float, default=0.2, metavar="X", help="least share of right answers (default 0.2)")
    add("--high", type=float, default=0.8, metavar="X", help="largest share of right answers (default 0.8)")
    add("--max-new-tokens", type=int, metavar="N", help="of an answer (default: the run's, else 64)")
    add("--max-prompt-tokens", type=int, metavar="N", help="others are left out (default: the run's, else 448)")
    add("--seed", type=int, default=0, metavar="N", help="of problems and sampling (default 0)")
    perfectible.set_defaults(run=_perfectible)


def _perfectible(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    file = Path(known.output)
    _check(known, file)
    overrides = dotted_overrides(argparse.Namespace(), rest)
    for field in overrides:
        if not field.startswith("task."):
            raise ConfigError(f"unknown option --{field} of qarl data perfectible; --help lists what it takes")
    if known.task is not None:
        overrides["task.name"] = known.task
    for field in ("problems", "samples", "temperature"):
        overrides[f"eval.{field}"] = str(getattr(known, field))
    overridden({}, overrides)
    quiet_libraries()
    with told_to(Console(stderr=True)):
        plan = plan_evaluation(known.target, overrides, known.max_new_tokens, known.max_prompt_tokens)
        from qarl.run.perfectible import write_perfectible

        found = write_perfectible(plan, known.seed, known.low, known.high, file)
    share = f"{known.low:.0%} to {known.high:.0%}"
    console.print(
        f"wrote {file}: {found.kept} of {found.asked} questions, of which {share} of the answers were right; "
        f"{found.below} were solved less often, {found.above} more often",
        soft_wrap=True, markup=False, highlight=False,
    )  # fmt: skip
    if not found.kept:
        console.print("none is left to train on: ask more (--problems), or widen --low and --high", highlight=False)
        return 1
    run = (Path(known.target) / "config.yaml").is_file()
    model = RunFolder.open(Path(known.target)).config().model if run else known.target
    check = " --reward math --task.correct math" if plan.task.name == "math" else ""  # not what a file's default is
    command = f"qarl train --model {shlex.quote(model)} --task {shlex.quote(str(file))}{check} --eval.problems 0"
    console.print(f"train on them: {command}", soft_wrap=True, markup=False, highlight=False)
    return 0


def _check(known: argparse.Namespace, file: Path) -> None:
    """Before anything is loaded."""
    if not file.name.endswith(PERFECTIBLE):
        raise ConfigError(f"--output {known.output}: the name must end in {PERFECTIBLE}, by which a report knows it")
    check_new_folder(file, "file", "--output")
    if known.problems < 1:
        raise ConfigError(f"--problems {known.problems} must be at least 1")
    if not 0 <= known.low <= known.high <= 1:
        raise ConfigError(f"--low {known.low:g} and --high {known.high:g} must rise, from 0 to 1")
    if known.seed < 0:
        raise ConfigError(f"--seed {known.seed} must be at least 0")
