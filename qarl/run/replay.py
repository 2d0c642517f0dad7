"""Replay: learning again from a run's recorded completions (`from_rollouts`).

This file has its configuration, the check of the records, and the comparison with the recorded run.

Every command imports this, so numpy, which reads files of tokens, is imported when one is read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.flags import shown
from qarl.configs.load import overridden
from qarl.configs.schema.base import differing
from qarl.configs.schema.run import RunConfig
from qarl.report.run_folder import RunFolder, with_absolute_paths

_SAMPLED_WITH = ("model", "seed", "task", "rollout")
"""Sections and fields on which the recorded completions depend."""

_COMPARED = ("weight_version", "learn/", "digest")
"""Beginnings of the names of metrics that a replay must reproduce to the last bit."""


def replay_config(overrides: Mapping[str, str]) -> RunConfig:
    """Return the recorded run's configuration with overrides, which include from_rollouts.

    Evaluation and export, which need an engine, are off. Raises `ConfigError` for a folder that is
    not a run's.
    """
    recorded = RunFolder.open(Path(overrides["from_rollouts"]))
    return overridden(
        recorded.written() | {"output": None},
        {"eval.problems": "0", "export": "false", **overrides},
    )


def check_rollouts(config: RunConfig, run: str) -> None:
    """Raise `ConfigError` if a run's completions are incomplete or were sampled otherwise, and
    `TokenFileError` for a damaged file.

    run: its folder, `from_rollouts`.
    """
    from qarl.report.token_files import counts, step_files

    folder = RunFolder.open(Path(run))
    recorded_config = with_absolute_paths(folder.config())
    for path, (before, after) in differing(recorded_config, with_absolute_paths(config)).items():
        # The memory plan fills in kv_cache_gib, so it may differ.
        if path.split(".")[0] in _SAMPLED_WITH and path != "rollout.kv_cache_gib":
            raise ConfigError(
                f"run {run!r} was sampled with {path} {before!r}, and"
                f" {shown(path)} {after!r} has no effect on its completions; omit it, or"
                " train without from_rollouts"
            )
    files = step_files(folder.tokens)
    for step in range(1, config.steps + 1):
        recorded, completions = counts(files[step]) if step in files else (0, 0)
        if not recorded or recorded < completions:
            of = f"{recorded} of the {completions} completions" if recorded else "no completions"
            fewer = f"give --steps {step - 1}, or " if step > 1 else ""
            raise ConfigError(
                f"run {run!r} has recorded {of} of step {step}, of {config.steps}"
                f" to learn from; {fewer}take a run that was started with --record all"
            )


def comparison(
    recorded: Path,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
) -> str:
    """Return in words whether a replay did the same as the recorded run.

    before, after: lines of metrics.jsonl of the recorded run and of the replay.
    """
    for old, new in zip(before, after, strict=False):
        for name in dict.fromkeys([*old, *new]):
            if name.startswith(_COMPARED) and old.get(name) != new.get(name):
                return (
                    f"first apart from {recorded} in step {new['step']}: {name} {new.get(name)},"
                    f" was {old.get(name)}"
                )
    return (
        f"equal to {recorded} to the last bit, in all {len(after)} steps: every weight version's"
        " digest, and every metric of the learner"
    )
