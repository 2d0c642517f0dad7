"""The few lines that sum up a finished run."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.options import say
from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import heldout
from qarl.page.runs import configurations, read_runs
from qarl.page.verdict import verdict
from qarl.report.run_folder import RunFolder, read_metrics
from qarl.run.replay import comparison


def say_outcome(config: RunConfig, folder: Any, outcome: Any, console: Console) -> None:
    """Print the outcome of a finished run.

    folder: a `RunFolder`. outcome: the return value of `train`.
    """
    metrics = read_metrics(folder.metrics)
    headline, *remarks = verdict(configurations(read_runs([folder.path])))
    if config.from_rollouts is not None:
        recorded = RunFolder(Path(config.from_rollouts))
        say(
            console,
            comparison(recorded.path, read_metrics(recorded.metrics, config.steps), metrics),
        )
    elif metrics[-1]["weight_version"] == 0:
        say(
            console,
            "no step taught anything: the rewards of every group were equal, so the policy is the"
            " one the run started with; to see what the reward was given: qarl report"
            f" {shlex.quote(str(folder.path))} -o report.html",
        )
    elif headline.level != "good":
        say(console, headline.text)
    for warning in (remark for remark in remarks if remark.level == "warning"):
        say(console, warning.text)
    first = heldout({"accuracy": outcome.first_accuracy, "heldout_reward": outcome.first_reward})
    exported = heldout(
        {"accuracy": outcome.export_accuracy, "heldout_reward": outcome.export_reward}
    )
    if first is not None and exported is not None:
        say(
            console,
            f"held-out {first.name}, {config.scheme}: {first.figure} before, {exported.figure} of"
            f" the exported checkpoint in a fresh engine ({exported.since(first)})",
        )
    if outcome.served is not None:
        say(console, str(outcome.served))
    if outcome.export is not None:
        run = shlex.quote(str(folder.path))
        say(console, f"deployable checkpoint: {outcome.export}")
        say(console, f"serve it: qarl serve {run}")
        say(console, f"see how it went: qarl report {run}")
