"""`qarl check`: all that a run needs, looked at in seconds, one prompt and what the reward makes of its answer too."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.help import add_flags
from qarl.cli.options import dotted_overrides
from qarl.configs.flags import FLAGS
from qarl.configs.load import config_file, default_config, load_config
from qarl.configs.schema.run import RunConfig
from qarl.report.startup import phase, told_to
from qarl.run.check import check_files

if TYPE_CHECKING:  # which imports torch
    from qarl.run.preview import Finding


def add_check(commands: Any) -> None:
    """Add `qarl check` to the commands."""
    check = commands.add_parser(
        "check",
        help="look at a configuration before it runs: model, one prompt, the reward, lengths, disk, kernels",
        usage="qarl check [CONFIG] [OPTIONS] [--ANY.FIELD VALUE …]",
        description="Look at everything a run needs, without an engine or training. CONFIG is a YAML file, or the "
        "name of a shipped one; options are those of `qarl train`. Exit status 1 where something looks wrong.",
        allow_abbrev=False,
    )
    check.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="YAML file, or a shipped name; default: as `qarl train`",
    )
    add_flags(check, FLAGS)
    check.set_defaults(run=_check)


def _check(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    overrides = dotted_overrides(known, rest)
    file = default_config(overrides.get("model")) if known.config is None else config_file(known.config)
    config = load_config(file, overrides)
    warnings = show(checked(config, console), console)
    console.print(f"{warnings} warning{'s' * (warnings != 1)}" if warnings else "all well", highlight=False)
    return 1 if warnings else 0


def checked(config: RunConfig, console: Console, new: bool = True) -> list["Finding"]:
    """What `qarl.run.preview` says of a configuration, with its phases on the console. new: whether a run's folder is
    to be made."""
    quiet_libraries(config.learner.compile is True)
    with told_to(console):
        with phase("checking files, task and reward"):
            task = check_files(config, new)
        with phase("importing torch and transformers"):
            from qarl.run.preview import preview
            from qarl.run.session import check_processes, model_folder, require_schemes
        check_processes(config, 1)
        with phase("checking kernels"):
            require_schemes(config)
        with phase("checking tokenizer, prompts and reward"):
            return list(preview(config, task, model_folder(config.model)))


def show(findings: Sequence["Finding"], console: Console) -> int:
    """Print them; how many are warnings."""
    for finding in findings:
        mark = "warning: " if finding.warning else ""
        lines = finding.text.split("\n")
        body = lines[0] if len(lines) == 1 else "\n" + textwrap.indent(finding.text, "  | ")
        console.print(f"{mark}{finding.title}: {body}", markup=False, highlight=False, soft_wrap=True)
    return sum(finding.warning for finding in findings)
