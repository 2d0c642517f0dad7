"""`qarl sft`: fine-tune the low-bit policy on pairs of a prompt and a completion."""

import argparse
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from functools import cache
from math import ceil
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.help import add_group
from qarl.cli.options import add_count, say, whole
from qarl.configs.errors import ConfigError
from qarl.configs.load import is_embedded
from qarl.configs.schema.base import leaf_values
from qarl.configs.schema.run import RunConfig
from qarl.configs.version import VERSION
from qarl.quant.runtime.parent import world_size
from qarl.report.startup import phases_shown_on
from qarl.sft.run import SftOutcome, SftPlan, plan_sft, run_sft, sft_config

_GROUPS = {
    "what is trained": ("model", "scheme", "layers", "dtype"),
    "how it is learned": ("optimizer", "lr", "master-dtype", "kernel"),
}
_LINES = 20
"""Approximate number of steps that are printed."""


def add_sft(commands: Any) -> None:
    """Add `qarl sft` to the commands."""
    parser = commands.add_parser(
        "sft",
        help="Fine-tune the low-bit policy on prompt-completion pairs.",
        usage="qarl sft --data FILE [OPTIONS] [--ANY.FIELD VALUE …]",
        description=(
            "Fine-tune a policy on pairs of a prompt and a completion, if it cannot begin"
            " reinforcement learning yet. The loss is the completions' cross-entropy through the"
            " low-bit codes that are deployed. The command writes export/, the codes, and masters/,"
            " the model that `qarl train --model` continues with."
        ),
        epilog=(
            "Other fields of a run's configuration are options by their dotted names if they"
            " apply, such as --learner.optimizer.warmup_steps 10 or --task.system TEXT"
            " (docs/guide/sft.md)."
        ),
    )
    data = parser.add_argument_group("what is learned from")
    data.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help=(
            "Pairs, one a row, in columns prompt and completion, question and answer, or messages:"
            " a .jsonl, .csv, .tsv or .parquet file, or hf:ID."
        ),
    )
    data.add_argument(
        "--heldout",
        type=fraction,
        default=0.125,
        metavar="X",
        help=(
            "Fraction of the pairs to hold out, on which the loss is measured before and after; 0"
            ' for none. A row\'s own "split" takes precedence. [0.125]'
        ),
    )
    data.add_argument(
        "--batch", type=whole(1), default=32, metavar="N", help="Pairs per step. [32]"
    )
    data.add_argument(
        "--seed", dest="short:seed", metavar="N", help="Seed for the order of the pairs. [0]"
    )
    add_count(data, "--epochs", "Passes over the pairs. [1]")
    add_count(data, "--steps", "Number of steps, instead of --epochs.")
    for title, names in _GROUPS.items():
        add_group(parser, title, names, _default_values)
    written = parser.add_argument_group("where it is written")
    text = "Folder to create. Default: runs/MODEL-SCHEME-sft-TIME."
    written.add_argument("--output", dest="short:output", metavar="DIR", help=text)
    parser.set_defaults(run=_sft, fields=True)


@cache
def _default_values() -> Mapping[str, Any]:
    """Return dotted path → value of every field of a fine-tuning without options."""
    return leaf_values(sft_config("pairs.jsonl", {}))


def fraction(text: str) -> float:
    """Return the value of an option that takes 0 to below 1. Raises `ArgumentTypeError` for other
    values.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"{text!r} must be a number from 0 to below 1")
    return value


def _sft(known: argparse.Namespace, console: Console) -> int:
    if known.steps and known.epochs:
        raise ConfigError(
            f"--steps {known.steps} and --epochs {known.epochs} both say how long; leave one of"
            " them out"
        )
    if world_size() > 1:
        raise ConfigError(
            f"qarl sft runs in one process, and a launcher started {world_size()}; start it alone"
        )
    overrides = dict(known.overrides)
    if overrides.get("learner.deepspeed"):
        raise ConfigError(
            "learner.deepspeed is for qarl train; qarl sft runs in one process, which steps all"
            " masters: omit it"
        )
    if known.steps:
        overrides["steps"] = str(known.steps)
    epochs = None if known.steps else known.epochs or 1
    quiet_libraries(overrides.get("learner.compile") == "true")
    with phases_shown_on(console):
        plan = plan_sft(known.data, overrides, known.batch, epochs, known.heldout)
        _say_plan(plan, console)
        outcome = run_sft(plan, _step_printer(plan, console))
    _say_outcome(plan, outcome, console)
    return 0


def _say_plan(plan: SftPlan, console: Console) -> None:
    config = plan.config
    tokens = sum(len(group.completions[0].token_ids) for group in plan.learned)
    say(
        console,
        f"qarl {VERSION}: {config.model}, {config.scheme}, {config.dtype}",
    )
    say(
        console,
        f"{config.task.name}: {len(plan.learned)} pairs to learn from, with {tokens} completion"
        f" tokens; {len(plan.heldout)} held out; {config.steps} steps of {plan.batch} pairs",
    )


def _step_printer(plan: SftPlan, console: Console) -> Callable[[Any], None]:
    """Return a function that prints the loss of the first step, the last, and some in between."""
    steps = plan.config.steps
    every = ceil(steps / _LINES)

    def show(done: Any) -> None:
        if done.step in (1, steps) or done.step % every == 0:
            skipped = "" if done.updated else "; skipped: its gradient is not finite"
            figures = f"loss {done.loss:.4f} nats a token, lr {done.lr:.2e}, {done.seconds:.2f} s"
            say(console, f"step {done.step}/{steps}: {figures}{skipped}")

    return show


def _say_outcome(plan: SftPlan, outcome: SftOutcome, console: Console) -> None:
    config = plan.config
    if outcome.before is not None:
        change = f"{outcome.before:.4f} nats a token before, {outcome.after:.4f} after"
        say(
            console,
            f"held-out loss, {config.scheme}: {change} ({len(plan.heldout)} pairs)",
        )
    file = f"--config {config.model} " if is_embedded(config.model) else ""
    dtype = ""
    if config.dtype != RunConfig.model_fields["dtype"].default:
        dtype = f" --dtype {config.dtype}"
    layers = ""
    if config.layers:
        layers = f" --layers {shlex.quote(','.join(map(str, config.layers)))}"
    say(console, f"deployable checkpoint: {outcome.export}")
    say(console, str(outcome.served))
    say(console, f"masters, {config.learner.master_dtype}: {outcome.masters}")
    say(
        console,
        f"go on by reinforcement learning: qarl train {file}--model"
        f" {shlex.quote(str(outcome.masters))} --scheme {config.scheme}{dtype}{layers}",
    )
