"""A run's folder: configuration, environment, metrics, tokens, checkpoints, export."""

import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from qarl.configs.errors import ConfigError
from qarl.configs.files import written_aside
from qarl.configs.load import config_from_tree, is_embedded, refuse_unknown
from qarl.configs.schema.base import differing
from qarl.configs.schema.objectives import OwnConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.yaml_file import read_yaml
from qarl.quant.runtime.answers import cpu_facts, versions
from qarl.tasks.paths import absolute, absolute_function

FIXED_FIELDS = (
    "model",
    "scheme",
    "quantization",
    "layers",
    "dtype",
    "seed",
    "task",
    "from_rollouts",
    "rollout.prompts",
    "rollout.samples",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.stop",
    "rollout.loop_limit",
    "rollout.dynamic_sampling",
    "rollout.max_staleness",
    "learner.aligned",
    "learner.compile",
    "learner.compute_dtype",
    "learner.input_gradients",
    "learner.master_dtype",
    "learner.optimizer.name",
    "learner.optimizer.rounding",
    "learner.lora",
)
"""What a resumed run may not change, but for what may have stopped it: `_BOUNDS`."""
_BOUNDS = ("task.time_limit", "task.memory_limit", "task.on_error")


class RunInUseError(ConfigError):
    """A run that another process writes now."""


class RunFolder:
    """Paths and small files of one run.

    metrics: one JSON object a step. start: what was found before step 1: the audit, the first
    publish's canary, held-out accuracy. tokens: some completions of every step, token by token: a
    Parquet file a step (`qarl.report.token_files`). checkpoints: what `--resume` continues from.
    export: the deployable checkpoint. engine_start: the checkpoint the engine first loaded.
    """

    def __init__(self, path: Path, created: tuple[Path, ...] = ()):
        """created: folders above it that were made for it, the innermost first."""
        self.path = path
        self._made = created
        self.metrics, self.start = path / "metrics.jsonl", path / "start.json"
        self.tokens, self.checkpoints = path / "tokens", path / "checkpoints"
        self.export, self.engine_start = path / "export", path / "engine-start"

    @classmethod
    def create(cls, config: RunConfig) -> "RunFolder":
        """A new folder holding the resolved configuration, its paths absolute. Raises `ConfigError`
        where it exists.
        """
        path = new_path(config)
        created = tuple(folder for folder in path.parents if not folder.exists())
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"run folder {str(path)!r} exists; continue it with --resume {path}, or give"
                " another --output"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot make run folder {str(path)!r}: {error.strerror}; give another --output"
            ) from error
        folder = cls(path, created)
        try:
            folder.write_config(config)
            (path / "environment.json").write_text(
                json.dumps(describe_environment(), indent=2) + "\n"
            )
        except BaseException:
            folder.discard()
            raise
        return folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run: no other process may write it meanwhile. The system lets go should this one
        die.

        Raises `RunInUseError` naming the process that holds it.
        """
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "(unknown)"
                raise RunInUseError(
                    f"run {str(self.path)!r} is written by process {holder}; wait for it to end, or"
                    " stop it"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def is_held(self) -> bool:
        """Whether a process writes the run now (`locked`)."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def has_begun(self) -> bool:
        """Whether a step was done or a checkpoint written: something to keep."""
        return bool(self.steps()) or (self.metrics.is_file() and self.metrics.stat().st_size > 0)

    def discard(self) -> None:
        """Remove the folder, and those above it that were made for it, where nothing else came into
        them.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.checkpoints)

    def require_checkpoint(self) -> None:
        """Raises `ConfigError` for a run without a checkpoint: there is nothing of it to export or
        go on from.
        """
        if not self.steps():
            config = self.config()
            first = min(config.checkpoint.every, config.steps)
            raise ConfigError(
                f"run {str(self.path)!r} holds no checkpoint yet, the first of which is of step"
                f" {first}: wait for it, or start the run again with another --output"
            )

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run. Raises `ConfigError` where there is none."""
        if not path.is_dir():
            raise ConfigError(
                f"there is no folder {str(path)!r}; give a run's, by default one of runs/"
            )
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{str(path)!r} is no run folder (it has no config.yaml); give one of runs/"
            )
        return cls(path)

    def write_config(self, config: RunConfig) -> None:
        """Keep what the run goes on with, whole or not at all."""
        tree = with_absolute_paths(config).model_dump(mode="json")
        with written_aside(self.path / "config.yaml") as building:
            building.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")

    def config(self) -> RunConfig:
        """The configuration the run was started with."""
        return config_from_tree(self.written())

    def written(self) -> dict[str, Any]:
        """What config.yaml holds. Raises `ConfigError` for one that is damaged, or of a version
        with other fields.
        """
        file = self.path / "config.yaml"
        tree = read_yaml(file)
        try:
            refuse_unknown(tree, str(file))
        except ConfigError as error:
            raise ConfigError(
                f"{error}: the run was started by another version of qarl (environment.json in its"
                " folder names it); continue it with that one"
            ) from error
        return tree


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first; copies with other names beside
    them are none.
    """
    named = (
        re.fullmatch(r"step-(\d{6,})", file.parent.name)
        for file in folder.glob("step-*/manifest.json")
    )
    return sorted(int(match[1]) for match in named if match)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """With the paths of model, questions and functions absolute, as they are found from the working
    folder: a run is resumed and evaluated from any. Names of what is no file here (built-in tasks,
    ids on the Hub, modules) stay.
    """
    here, objective = Path.cwd(), config.learner.objective
    if isinstance(objective, OwnConfig):
        objective = objective.model_copy(
            update={"function": absolute_function(objective.function, here)}
        )
    model = Path(config.model)
    local = model.is_dir() and not is_embedded(config.model)
    return config.model_copy(
        update={
            "from_rollouts": config.from_rollouts and str(Path(config.from_rollouts).absolute()),
            "model": str(model.absolute()) if local else config.model,
            "task": absolute(config.task, here),
            "learner": config.learner.model_copy(update={"objective": objective}),
        }
    )


def new_path(config: RunConfig) -> Path:
    """Where a run started now is to be written: `output`, or runs/<model>-<scheme>-<time>."""
    name = f"{Path(config.model).name}-{config.scheme}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(config.output) if config.output else Path("runs") / name


def resumed_config(started: RunConfig, resumed: RunConfig) -> RunConfig:
    """The configuration to continue with. Raises `ConfigError` where a field that fixes the run
    differs.
    """
    started, resumed = with_absolute_paths(started), with_absolute_paths(resumed)
    for path, (old, new) in differing(started, resumed).items():
        if path not in _BOUNDS and f"{path}.".startswith(
            tuple(f"{field}." for field in FIXED_FIELDS)
        ):
            raise ConfigError(
                f"this run was started with {path} {old!r} and cannot be resumed with {new!r};"
                " start a new run for that"
            )
    return resumed


def describe_environment() -> dict[str, Any]:
    """Versions and machine facts a reader needs to reproduce figures."""
    import torch

    machine = {
        "python": platform.python_version(),
        "device": _device_name(),
        "threads": torch.get_num_threads(),
    }
    return {**machine, **versions()}


def _device_name() -> str:
    """The GPU's name, else the CPU's, which decides what vLLM's kernels round."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return (
        f"{cpu_facts().get('model name', 'CPU')},"
        f" {'with' if torch.cpu._is_amx_tile_supported() else 'without'} AMX"
    )
