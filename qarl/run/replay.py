"""Learning again from a run's recorded completions (`from_rollouts`): what it is given, and what it
is held to.

Every command imports this; numpy, which reads files of tokens, waits until one is read.
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
"""Sections and fields that made the recorded completions."""

_COMPARED = ("weight_version", "learn/", "digest")


def replay_config(overrides: Mapping[str, str]) -> RunConfig:
    """The recorded run's configuration under overrides, of which from_rollouts is one; what needs
    an engine is off.

    Raises `ConfigError` for a folder that is no run.
    """
    recorded = RunFolder.open(Path(overrides["from_rollouts"]))
    return overridden(
        recorded.written() | {"output": None},
        {"eval.problems": "0", "export": "false", **overrides},
    )


def check_rollouts(config: RunConfig) -> None:
    """Raise `ConfigError` where the completions of `from_rollouts`, if there are to be any, were
    sampled with other settings or are not all there; `TokenFileError` for a damaged file.
    """
    if config.from_rollouts is None:
        return
    from qarl.report.token_files import counts, step_files

    folder = RunFolder.open(Path(config.from_rollouts))
    for path, (before, after) in differing(
        *map(with_absolute_paths, (folder.config(), config))
    ).items():
        # which the plan fills in
        if path.split(".")[0] in _SAMPLED_WITH and path != "rollout.kv_cache_gib":
            raise ConfigError(
                f"run {config.from_rollouts!r} was sampled with {path} {before!r}, and"
                f" {shown(path)} {after!r} would do nothing to its completions; leave it out, or"
                " train without from_rollouts"
            )
    files = step_files(folder.tokens)
    for step in range(1, config.steps + 1):
        recorded, completions = counts(files[step]) if step in files else (0, 0)
        if not recorded or recorded < completions:
            of = f"{recorded} of the {completions} completions" if recorded else "no completions"
            fewer = f"give --steps {step - 1}, or " if step > 1 else ""
            raise ConfigError(
                f"run {config.from_rollouts!r} has recorded {of} of step {step}, of {config.steps}"
                f" to learn from; {fewer}take a run that was started with --record all"
            )


def comparison(
    recorded: Path,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
) -> str:
    """Whether a replay did what the recorded run did, in words. before, after: the lines of their
    metrics.jsonl.
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
