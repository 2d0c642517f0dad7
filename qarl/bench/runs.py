"""Runs a benchmark needs: trained once, found again later, continued where they broke off."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.learner.processes import Processes
from qarl.report.dashboard import Dashboard
from qarl.report.located import located
from qarl.report.run_folder import RunFolder
from qarl.run.checkpoint import list_checkpoints
from qarl.train import train

_PLANNED = {
    ("rollout", "kv_cache_gib"): None,
    ("learner", "gradient_checkpointing"): "auto",
    ("learner", "compile"): "auto",
}
"""Fields that `qarl.plan` decides where they have this value; `qarl train` records what it decided."""


def refuse_chosen(overrides: Mapping[str, str], chosen: Sequence[str]) -> None:
    """Raise `ConfigError` for an override of a field, or of a section's fields, that the benchmark itself sets."""
    for key in overrides:
        if any(key == name or key.startswith(f"{name}.") for name in chosen):
            raise ConfigError(f"--{key} is chosen by the benchmark; its --help lists its own options")


def overrides_in(scheme: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """The overrides of a run in that scheme: without `quantization.*` where it is unquantized, and would refuse it."""
    return {k: v for k, v in overrides.items() if scheme != "bf16" or not k.startswith("quantization.")}


def existing_run(config: RunConfig) -> RunFolder | None:
    """The run in `config.output`, finished or not; None where there is none.

    Raises `ConfigError` where a run of another configuration has that place.
    """
    assert config.output is not None
    path = Path(config.output)
    if not path.exists():
        return None
    folder = RunFolder.open(path)
    wanted, found = (located(c).model_dump(mode="json", exclude={"output"}) for c in (config, folder.config()))
    for (section, field), undecided in _PLANNED.items():
        if wanted[section][field] == undecided:
            found[section][field] = undecided
    for key, value in wanted.items():
        if found[key] != value:
            raise ConfigError(
                f"run {str(path)!r} has {key} {found[key]!r} where {value!r} is wanted; choose another folder of runs, "
                "or remove that one"
            )
    return folder


def is_finished(folder: RunFolder, config: RunConfig) -> bool:
    """Whether the run did all its steps and has its export."""
    checkpoints = list_checkpoints(folder.checkpoints)
    last = bool(checkpoints) and checkpoints[-1].name == f"step-{config.steps:06d}"
    return last and folder.export.is_dir()


def finished_run(config: RunConfig, console: Console) -> RunFolder:
    """The finished run of this configuration: found in `config.output`, continued, or trained now.

    A run that broke off before its first checkpoint has nothing to continue from and is begun again. Raises
    `KeyboardInterrupt` where training was interrupted, after its checkpoint is written.
    """
    folder = existing_run(config)
    if folder and is_finished(folder, config):
        console.print(f"trained already: {folder.path}", soft_wrap=True)
        return folder
    if folder and not list_checkpoints(folder.checkpoints):
        shutil.rmtree(folder.path)
        folder = None
    resume = folder is not None
    folder = folder or RunFolder.create(config)
    console.print(f"{'continuing' if resume else 'training'}: {folder.path}", soft_wrap=True)
    with folder.locked(), Dashboard(config, console) as dashboard:
        outcome = train(config, folder, dashboard, Processes(), resume)
    if outcome.steps < config.steps:
        raise KeyboardInterrupt
    return folder
