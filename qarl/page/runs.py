"""Run folders as a report reads them: without torch, whole or still being written."""

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
from qarl.report.run_folder import RunFolder
from qarl.report.start_note import StartNote, read_start
from qarl.report.token_files import step_files
from qarl.run.export_note import read_note

Metrics = dict[str, Any]

_NEEDED = (
    "step",
    "weight_version",
    "reward",
    "response_tokens",
    "error_tokens",
    "seconds/sample",
)
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
"""Fields, or sections of them, in which runs of one configuration may differ."""

_FIRST_NAMED = (
    "model",
    "scheme",
    "learner.aligned",
    "learner.objective.name",
    "dtype",
    "learner.optimizer.lr",
)
_MOST_NAMED = 4


@dataclass(frozen=True)
class RecordedRun:
    """One run. name: its folder's. metrics: a line a step. token_files: step → file. deployed: what
    held-out answers of the export in a fresh engine come to, None where there is none.
    """

    name: str
    config: RunConfig
    metrics: list[Metrics]
    start: StartNote | None
    environment: dict[str, Any]
    token_files: dict[int, Path]
    deployed: Heldout | None

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.metrics[-1]["step"] >= self.config.steps

    def heldout(self) -> dict[int, Heldout]:
        """Step → what held-out answers came to, where they were asked for; 0: before the first."""
        measured = {0: heldout(vars(self.start)) if self.start else None}
        measured |= {m["step"]: heldout(m) for m in self.metrics}
        return {step: each for step, each in measured.items() if each is not None}


@dataclass(frozen=True)
class Configuration:
    """Runs that differ in their seed alone. label: what tells it from the page's others."""

    label: str
    runs: tuple[RecordedRun, ...]


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Raises `ConfigError` for no run, one without steps, one given twice, and lines damaged or of
    another version.
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
            f"{str(environment)!r} is no JSON ({error}); remove it to go on without"
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
    """The whole lines; the last may be cut short, by a run that is going on or was killed."""
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else [""]
    metrics: list[Metrics] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            of_step = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{str(file)!r}, line {number}, is no JSON ({error}); remove that line"
            ) from error
        missing = [name for name in _NEEDED if not isinstance(of_step, dict) or name not in of_step]
        if missing:
            raise ConfigError(
                f"{str(file)!r}, line {number}, lacks {missing[0]!r}: another version of qarl wrote"
                " it (environment.json in its folder names it); make the report with that one"
            )
        metrics.append(of_step)
    if not metrics:
        raise ConfigError(
            f"run {str(file.parent)!r} has no steps yet; make its report once its first step is"
            " done"
        )
    return metrics


def configurations(runs: Sequence[RecordedRun]) -> list[Configuration]:
    """Runs that differ in their seed alone, together; in the order of the first of each."""
    settings = [compared_settings(run.config) for run in runs]
    kinds: list[dict[str, Any]] = []
    for setting in settings:
        if setting not in kinds:
            kinds.append(setting)
    members = [
        tuple(run for run, own in zip(runs, settings, strict=True) if own == kind) for kind in kinds
    ]
    labels = _labels(kinds)
    if len(set(labels)) < len(labels):
        labels = [group[0].name for group in members]
    return [Configuration(label, group) for label, group in zip(labels, members, strict=True)]


def compared_settings(
    config: RunConfig, left_out: tuple[str, ...] = _NOT_COMPARED
) -> dict[str, Any]:
    """Dotted field → value, of what makes two runs two configurations."""
    flat = leaf_values(config)
    return {name: to_jsonable_python(flat[name]) for name in flat if not name.startswith(left_out)}


def shown_settings(
    kinds: Sequence[Configuration],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Each configuration's settings, and the names of those that a page shows: in which they
    differ; of one alone those that are not the defaults, and what it trains.
    """
    if len(kinds) > 1:
        settings = [compared_settings(kind.runs[0].config) for kind in kinds]
        return settings, differing(settings)
    ours, defaults = (
        compared_settings(config, ("output",)) for config in (kinds[0].runs[0].config, RunConfig())
    )
    named = [name for name in differing([ours, defaults]) if name in ours]
    return [ours], list(dict.fromkeys(("model", "scheme", *named)))


def differing(kinds: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the fields in which they differ, those that say most first."""
    names = dict.fromkeys(name for kind in kinds for name in kind)
    apart = [name for name in names if any(kind.get(name) != kinds[0].get(name) for kind in kinds)]
    return sorted(
        apart,
        key=lambda name: _FIRST_NAMED.index(name) if name in _FIRST_NAMED else len(_FIRST_NAMED),
    )


def _labels(kinds: Sequence[dict[str, Any]]) -> list[str]:
    if len(kinds) == 1:
        shown = [
            Path(kinds[0]["model"]).name,
            kinds[0]["scheme"],
            kinds[0]["learner.objective.name"],
        ]
        return [" · ".join(shown)]
    names = differing(kinds)[:_MOST_NAMED]
    return [
        " · ".join(filter(None, (_worded(name, kind.get(name)) for name in names)))
        for kind in kinds
    ]


def _worded(name: str, value: Any) -> str:
    if name == "learner.aligned":
        return "aligned" if value else "plain learner"
    if name in ("model", "scheme", "dtype", "learner.objective.name"):
        return str(value)
    return "" if value is None else f"{name.removeprefix('learner.')} {value}"
