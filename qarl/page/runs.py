"""Reading of run folders for a report, finished or still being written. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from qarl.configs.errors import ConfigError
from qarl.configs.schema.base import leaf_values
from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import Heldout, heldout
from qarl.report.run_folder import RunFolder, read_metrics
from qarl.report.start_note import StartNote, read_start
from qarl.report.token_files import step_files
from qarl.run.export_note import read_note

Metrics = dict[str, Any]
"""A line of metrics.jsonl, parsed."""

_NEEDED = (
    "step",
    "weight_version",
    "reward",
    "response_tokens",
    "error_tokens",
    "seconds/sample",
)
"""Metrics that every line has."""

_NOT_COMPARED = (
    "seed",
    "output",
    "steps",
    "record",
    "export",
    "eval.",
    "checkpoint.",
    "sync.",
    "rollout.kv_cache_gib",
    "rollout.max_num_seqs",
    "learner.diagnostics_every",
    "early_warning",
    "from_rollouts",
)
"""Fields, or sections of fields, in which runs of one configuration may differ."""

_FIRST_NAMED = (
    "model",
    "scheme",
    "learner.aligned",
    "learner.objective.name",
    "dtype",
    "learner.optimizer.lr",
)
"""Fields that come first in a list of differences."""

_MOST_NAMED = 4
"""Upper bound on the number of fields in a configuration's label."""


@dataclass(frozen=True)
class RecordedRun:
    """The contents of one run's folder."""

    name: str
    """Name of the folder."""

    config: RunConfig
    """Configuration of the run."""

    metrics: list[Metrics]
    """Metrics of each step, in order; at least one step."""

    start: StartNote | None
    """Facts before the first step; None if the run has no note of them."""

    environment: dict[str, Any]
    """Versions and machine (`qarl.report.run_folder.describe_environment`)."""

    token_files: dict[int, Path]
    """Step → file of its recorded completions."""

    deployed: Heldout | None
    """Held-out measurement of the export in a fresh engine; None if there is none."""

    @property
    def finished(self) -> bool:
        """True if all steps are done."""
        return self.metrics[-1]["step"] >= self.config.steps

    def heldout(self) -> dict[int, Heldout]:
        """Return step → held-out measurement of the steps that were evaluated.

        Step 0 is the initial policy.
        """
        measured = {0: heldout(vars(self.start)) if self.start else None}
        measured |= {m["step"]: heldout(m) for m in self.metrics}
        return {step: result for step, result in measured.items() if result is not None}


@dataclass(frozen=True)
class Configuration:
    """Runs that differ in their seed alone."""

    label: str
    """Name that tells the configuration from the others of a page."""

    runs: tuple[RecordedRun, ...]
    """The runs."""


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read the folders of some runs.

    Raises `ConfigError` if a path is no run, is given twice, has no steps yet, or has lines that
    are damaged or written by another version.
    """
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise ConfigError(f"run {str(paths[index])!r} is given twice; give it once")
    return [_read_run(path) for path in paths]


def _read_run(path: Path) -> RecordedRun:
    folder = RunFolder.open(path)
    config = folder.config()
    environment = path / "environment.json"
    try:
        facts = json.loads(environment.read_text()) if environment.is_file() else {}
    except ValueError as error:
        raise ConfigError(
            f"{str(environment)!r} is not JSON ({error}); remove it to go on without"
        ) from error
    return RecordedRun(
        name=path.resolve().name,
        config=config,
        metrics=_read_metrics(folder.metrics),
        start=read_start(folder),
        environment=facts,
        token_files=step_files(folder.tokens),
        deployed=heldout(read_note(folder.export)),
    )


def _read_metrics(file: Path) -> list[Metrics]:
    """Read a metrics.jsonl of at least one step, whose lines have what the page needs."""
    metrics = read_metrics(file)
    for number, step in enumerate(metrics, 1):
        missing = [name for name in _NEEDED if name not in step]
        if missing:
            raise ConfigError(
                f"{str(file)!r}, line {number}, lacks {missing[0]!r}: another version of qarl wrote"
                " it (environment.json in its folder names it); make the report with that one"
            )
    if not metrics:
        raise ConfigError(
            f"run {str(file.parent)!r} has no steps yet; make its report once its first step is"
            " done"
        )
    return metrics


def configurations(runs: Sequence[RecordedRun]) -> list[Configuration]:
    """Group runs that differ in their seed alone, in the order of each group's first run."""
    kinds: list[dict[str, Any]] = []
    groups: list[list[RecordedRun]] = []
    for run in runs:
        settings = compared_settings(run.config)
        if settings not in kinds:
            kinds.append(settings)
            groups.append([])
        groups[kinds.index(settings)].append(run)
    labels = _labels(kinds)
    # If a label is too short to tell two configurations apart, a run's name does.
    if len(set(labels)) < len(labels):
        labels = [group[0].name for group in groups]
    labelled = zip(labels, groups, strict=True)
    return [Configuration(label, tuple(group)) for label, group in labelled]


def compared_settings(
    config: RunConfig, left_out: tuple[str, ...] = _NOT_COMPARED
) -> dict[str, Any]:
    """Return dotted field → value of the fields that distinguish configurations.

    left_out: prefixes of the fields that do not.
    """
    flat = leaf_values(config)
    return {name: to_jsonable_python(flat[name]) for name in flat if not name.startswith(left_out)}


def shown_settings(
    kinds: Sequence[Configuration],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return each configuration's settings, and the names of the settings that a page shows.

    These are the settings in which configurations differ. Of a single configuration they are model,
    scheme and the settings that differ from the defaults.
    """
    if len(kinds) > 1:
        settings = [compared_settings(kind.runs[0].config) for kind in kinds]
        return settings, differing(settings)
    ours = compared_settings(kinds[0].runs[0].config, ("output",))
    defaults = compared_settings(RunConfig(), ("output",))
    named = [name for name in differing([ours, defaults]) if name in ours]
    return [ours], list(dict.fromkeys(("model", "scheme", *named)))


def differing(kinds: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the fields in which settings differ, those of `_FIRST_NAMED` first."""
    names = dict.fromkeys(name for kind in kinds for name in kind)

    def differs(name: str) -> bool:
        return any(kind.get(name) != kinds[0].get(name) for kind in kinds)

    def rank(name: str) -> int:
        return _FIRST_NAMED.index(name) if name in _FIRST_NAMED else len(_FIRST_NAMED)

    return sorted(filter(differs, names), key=rank)


def _labels(kinds: Sequence[dict[str, Any]]) -> list[str]:
    """Return a label for each configuration, of the settings in which they differ."""
    if len(kinds) == 1:
        shown = [
            Path(kinds[0]["model"]).name,
            kinds[0]["scheme"],
            kinds[0]["learner.objective.name"],
        ]
        return [" · ".join(shown)]
    names = differing(kinds)[:_MOST_NAMED]
    labels = []
    for kind in kinds:
        words = [_worded(name, kind.get(name)) for name in names]
        labels.append(" · ".join(filter(None, words)))
    return labels


def _worded(name: str, value: Any) -> str:
    """Return a setting as part of a label, or "" if it is not set."""
    if name == "learner.aligned":
        return "aligned" if value else "plain learner"
    if name in ("model", "scheme", "dtype", "learner.objective.name"):
        return str(value)
    return "" if value is None else f"{name.removeprefix('learner.')} {value}"
