"""What a finished run comes to, in a few lines."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.configs.schema.run import RunConfig
from qarl.page.runs import configurations, read_runs
from qarl.page.verdict import verdict
from qarl.report.metrics import read_metrics, read_until
from qarl.report.run_folder import RunFolder
from qarl.run.replay import comparison


def say_outcome(config: RunConfig, folder: Any, outcome: Any, console: Console) -> None:
    """Print it. folder: `RunFolder`; outcome: what `train` returned."""
    metrics = read_metrics(folder.metrics)
    if config.from_rollouts is not None:
        recorded = RunFolder(Path(config.from_rollouts))
        console.print(
            comparison(recorded.path, read_until(recorded.metrics, config.steps), metrics),
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
    elif metrics[-1]["weight_version"] == 0:
        console.print(
            "no step taught anything: the rewards of every group were equal, so the policy is the one the run started "
            f"with; to see what the reward was given: qarl report {shlex.quote(str(folder.path))} -o report.html",
            soft_wrap=True,
        )
    elif poor := _poor_outcome(folder):
        console.print(poor, soft_wrap=True, markup=False, highlight=False)
    if outcome.first_accuracy is not None and outcome.export_accuracy is not None:
        gain = outcome.export_accuracy - outcome.first_accuracy
        console.print(
            f"held-out accuracy, {config.scheme}: {outcome.first_accuracy:.1%} before, "
            f"{outcome.export_accuracy:.1%} of the exported checkpoint in a fresh engine ({100 * gain:+.1f} points)",
            soft_wrap=True,
        )
    if outcome.export is not None:
        run = shlex.quote(str(folder.path))
        console.print(f"deployable checkpoint: {outcome.export}", soft_wrap=True, markup=False)
        console.print(f"serve it: qarl serve {run}", soft_wrap=True, markup=False, highlight=False)
        console.print(f"see how it went: qarl report {run}", soft_wrap=True, markup=False, highlight=False)


def _poor_outcome(folder: Any) -> str | None:
    """What a report's first line says of a run that did not get better; None for one that did."""
    headline = verdict(configurations(read_runs([folder.path])))[0]
    return None if headline.level == "good" else headline.text
