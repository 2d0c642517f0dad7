"""`qarl check`: check everything that a run needs before it begins."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.help import add_config, add_flags
from qarl.cli.mismatch import investigated, show
from qarl.cli.options import add_json, say, write_json
from qarl.configs.errors import ConfigError
from qarl.configs.load import chosen_config
from qarl.configs.schema.run import RunConfig
from qarl.preflight import preflight
from qarl.report.finding import Finding
from qarl.report.startup import phase, phases_shown_on

if TYPE_CHECKING:  # which imports torch
    from qarl.run.policy import RunInputs


def add_check(commands: Any) -> None:
    """Add `qarl check` to the commands."""
    check = commands.add_parser(
        "check",
        help=(
            "Check a configuration before it runs: model, one prompt, the reward, lengths, disk,"
            " kernels."
        ),
        usage="qarl check [CONFIG] [OPTIONS] [--ANY.FIELD VALUE …]\n       qarl check --machine",
        description=(
            "Check everything that a run needs, without an engine or training. CONFIG is a YAML"
            " file or the name of a shipped one; options are those of `qarl train`. The exit status"
            " is 1 if something looks wrong."
        ),
    )
    add_config(check)
    check.add_argument(
        "--sample",
        action="store_true",
        help=(
            "Sample one batch too, and test that learner and sampler are one policy: ratios,"
            " positions, prompts, embeddings and more."
        ),
    )
    check.add_argument(
        "--machine",
        action="store_true",
        help=(
            "Check the machine instead: driver, GPUs, memory, disk, compiler, vLLM's operators. It"
            " needs no model. `qarl schemes` lists kernels."
        ),
    )
    add_json(check, "Write the findings as JSON too.")
    add_flags(check)
    check.set_defaults(run=_check)


def _check(known: argparse.Namespace, console: Console) -> int:
    if known.machine and (known.config or known.overrides or known.sample):
        other = known.config or ("--sample" if known.sample else f"--{next(iter(known.overrides))}")
        raise ConfigError(
            f"{other} with --machine, which looks at the machine alone; omit one of them"
        )
    if known.machine:
        quiet_libraries()
        from qarl.preflight.machine import machine_findings

        findings = show(machine_findings(), console)
        tested = ""
    else:
        findings, tested = _of_run(
            chosen_config(known.config, known.overrides), known.sample, console
        )
    warnings = sum(finding.level == "warning" for finding in findings)
    say(
        console,
        f"{warnings} warning{'s' * (warnings != 1)}{tested}" if warnings else f"all well{tested}",
    )
    write_json(known.json, [dataclasses.asdict(finding) for finding in findings])
    return 1 if warnings else 0


def _of_run(
    config: RunConfig,
    sample: bool,
    console: Console,
) -> tuple[list[Finding], str]:
    """Return the findings on a configuration, and words on the tests of a sampled batch ("" without
    `sample`).
    """
    inputs, previewed = _previewed(config, console, new=not sample)
    findings = show(previewed, console)
    if not sample:
        return findings, ""
    investigation = investigated(config, console, inputs)
    from qarl.mismatch.pitfalls import CHECKS

    findings += show(investigation.pitfalls, console)
    tokens = int(investigation.batch.response_mask.sum())
    return findings, f"; {len(CHECKS)} tests on {tokens:,} tokens"


def _previewed(
    config: RunConfig,
    console: Console,
    new: bool,
) -> tuple["RunInputs", list[Finding]]:
    """Check a configuration, and return what its run takes and the findings of
    `qarl.preflight.preview`. Phases are shown on the console.

    new: whether a run folder is to be created.
    """
    quiet_libraries(config.learner.compile is True)
    with phases_shown_on(console):
        inputs = preflight(config, new)
        from qarl.preflight.preview import preview

        with phase("measuring prompts and reward"):
            return inputs, list(preview(config, inputs))
