"""`qarl mismatch`: show where learner and sampler differ, for any checkpoint and scheme, without
training.
"""

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.help import add_config, add_flags
from qarl.cli.options import add_json, say, write_json
from qarl.configs.errors import ConfigError
from qarl.configs.load import chosen_config
from qarl.configs.schema.run import RunConfig
from qarl.preflight import preflight
from qarl.report.finding import Finding
from qarl.report.startup import phase, phases_shown_on

if TYPE_CHECKING:  # which imports torch
    from qarl.run.policy import RunInputs


def add_mismatch(commands: Any) -> None:
    """Add `qarl mismatch` to the commands."""
    mismatch = commands.add_parser(
        "mismatch",
        help=(
            "Show where learner and sampler differ, for any checkpoint and scheme, as a page,"
            " layer by layer."
        ),
        usage="qarl mismatch [CONFIG] [OPTIONS] [--ANY.FIELD VALUE …]",
        description=(
            "Sample a configuration's prompts once, score the completions with three learners"
            " (unquantized, codes dequantized, aligned), compare every layer's output, and write"
            " the differences as a page. Nothing is trained. CONFIG is a YAML file or the name of a"
            " shipped one; options are those of `qarl train`."
        ),
    )
    add_config(mismatch)
    mismatch.add_argument(
        "--page",
        default="mismatch.html",
        metavar="FILE",
        help=("Page to write. Default: mismatch.html."),
    )
    add_json(mismatch, "Write the figures as JSON too.")
    add_flags(mismatch)
    mismatch.set_defaults(run=_mismatch)


def _mismatch(known: argparse.Namespace, console: Console) -> int:
    from qarl.page.build import check_output

    config = chosen_config(known.config, known.overrides)
    page = Path(known.page)
    check_output(page, "--page")
    investigation = investigated(config, console)
    from qarl.mismatch.investigate import scored_learners
    from qarl.mismatch.page import findings, mismatch_page

    learners = scored_learners(investigation)
    title = f"{config.model}, {config.scheme}, {config.dtype}"
    lines = findings(learners, investigation.layers, investigation.multiplies)
    lines += investigation.pitfalls
    if config.task.speaks:
        text = (
            "sampled were first turns alone; over a whole conversation a plain learner parts from"
            " the sampler by more."
        )
        lines = [
            *(line for line in lines if line.about != "aligned or not"),
            Finding("warning", "several turns", text),
        ]
    page.write_text(mismatch_page(title, lines, learners, investigation.layers), encoding="utf-8")
    show(lines, console)
    measured = {each.name: each.measured for each in learners}
    write_json(
        known.json,
        {
            "learners": measured,
            "layers": investigation.layers,
            "pitfalls": investigation.pitfalls,
        },
    )
    say(console, f"wrote {page}")
    return 0


def investigated(config: RunConfig, console: Console, inputs: "RunInputs | None" = None) -> Any:
    """Run `qarl.mismatch.investigate` with its phases on the console, and return its result.

    inputs: what the checks of the configuration returned. Default: it is checked here.
    """
    if config.rollout.pictures:
        raise ConfigError(
            f"rollout.pictures {config.rollout.pictures}: these learners are compared with"
            " transformers' operators, for which prompts are text alone; omit it and ask in text."
            " `qarl train` measures |Δ log p| with pictures in its first step"
        )
    quiet_libraries()
    with phases_shown_on(console):
        inputs = inputs or preflight(config)
        with phase("importing vllm"):
            from qarl.mismatch.investigate import investigate
        with phase("sampling, and scoring by three learners"):
            return investigate(config, inputs)


def show(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Print each finding as it comes, and return all of them."""
    shown = []
    for finding in findings:
        mark = "warning: " if finding.level == "warning" else ""
        if finding.about:
            mark += f"{finding.about}: "
        body = finding.text
        if "\n" in body:
            body = "\n" + textwrap.indent(body, "  | ")
        remedy = f"\n  -> {finding.remedy}" if finding.remedy else ""
        say(console, f"{mark}{body}{remedy}")
        shown.append(finding)
    return shown
