"""The folder of a run: configuration, environment, metrics, tokens, checkpoints and export."""

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
    "rollout.tensor_parallel_size",
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
"""Fields that a resumed run may not change, apart from `_BOUNDS` below them."""

_BOUNDS = ("task.time_limit", "task.memory_limit", "task.on_error")
"""Fields that a resumed run may change because they may have stopped it."""


class RunInUseError(ConfigError):
    """Raised for a run that another process is writing."""


class ChangedInputsError(ConfigError):
    """Raised for a run whose questions, functions or model are not those of its checkpoint."""


class RunFolder:
    """The paths and small files of one run."""

    def __init__(self, path: Path, created: tuple[Path, ...] = ()):
        """Set the paths; no file is read.

        created: parent folders that were created for the run, the innermost first.
        """
        self.path = path
        self._created = created
        self.metrics = path / "metrics.jsonl"
        """File of metrics, one JSON object a step."""
        self.start = path / "start.json"
        """File of the facts before step 1: audit, first publish's canary, held-out accuracy."""
        self.tokens = path / "tokens"
        """Folder of recorded completions, a Parquet file a step (`qarl.report.token_files`)."""
        self.checkpoints = path / "checkpoints"
        """Folder of the checkpoints that `--resume` continues from."""
        self.export = path / "export"
        """Folder of the deployable checkpoint."""
        self.engine_start = path / "engine-start"
        """Folder of the checkpoint that the engine loads first."""

    @classmethod
    def create(cls, config: RunConfig) -> "RunFolder":
        """Create the folder of a new run, and write the configuration with absolute paths into it.

        Raises `ConfigError` if the folder exists or cannot be created.
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
        """Lock the run, so that no other process writes it within this context.

        The system releases the lock if this process dies. Raises `RunInUseError`, which names the
        process that holds the lock.
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
        """Return whether a process is writing the run (`locked`)."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def has_begun(self) -> bool:
        """Return whether the run has results to keep: a finished step or a checkpoint."""
        if self.steps():
            return True
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    def discard(self) -> None:
        """Remove the folder, and the parents created for it that have nothing else in them."""
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._created:
            try:
                folder.rmdir()
            except OSError:  # not empty
                return

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.checkpoints)

    def require_checkpoint(self) -> None:
        """Raise `ConfigError` if the run has no checkpoint to export or continue from."""
        if self.steps():
            return
        config = self.config()
        first = min(config.checkpoint.every, config.steps)
        if self.is_held():
            raise ConfigError(
                f"run {str(self.path)!r} holds no checkpoint yet, the first of which is of step"
                f" {first}: wait for it, or lower checkpoint.every of the next run"
            )
        raise ConfigError(
            f"run {str(self.path)!r} ended before its first checkpoint, which would have been of"
            f" step {first} (checkpoint.every): nothing is left to continue from; start it again"
            f" with another --output, or with this one once {str(self.path)!r} is removed"
        )

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of an existing run. Raises `ConfigError` if `path` is none."""
        if not path.is_dir():
            raise ConfigError(
                f"there is no folder {str(path)!r}; give a run's, by default one of runs/"
            )
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{str(path)!r} is not a run folder (it has no config.yaml); give one of runs/"
            )
        return cls(path)

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml atomically, with absolute paths."""
        tree = with_absolute_paths(config).model_dump(mode="json")
        with written_aside(self.path / "config.yaml") as building:
            building.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")

    def config(self) -> RunConfig:
        """Return the configuration that config.yaml holds."""
        return config_from_tree(self.written())

    def written(self) -> dict[str, Any]:
        """Return the fields that config.yaml holds, as a tree.

        Raises `ConfigError` if the file is damaged, or written by a version with other fields.
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
    """Return the steps of the complete checkpoints in a folder, oldest first.

    Copies under other names are ignored.
    """
    # The manifest is written last, so that a checkpoint that has one is complete.
    manifests = folder.glob("step-*/manifest.json")
    names = (re.fullmatch(r"step-(\d{6,})", manifest.parent.name) for manifest in manifests)
    return sorted(int(match[1]) for match in names if match)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths of model, questions and functions.

    Paths are relative to the working folder so far, and a run may be resumed and evaluated from
    another one. Names that are no file here stay: built-in tasks, ids on the Hub, modules.
    """
    here = Path.cwd()
    objective = config.learner.objective
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
    """Return the folder for a run that starts now: `output`, or runs/<model>-<scheme>-<time>."""
    name = f"{Path(config.model).name}-{config.scheme}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(config.output) if config.output else Path("runs") / name


def resumed_config(started: RunConfig, resumed: RunConfig) -> RunConfig:
    """Return the configuration to continue a run with, with absolute paths.

    Raises `ConfigError` if a field of `FIXED_FIELDS` differs from the run's.
    """
    started = with_absolute_paths(started)
    resumed = with_absolute_paths(resumed)
    fixed = tuple(f"{field}." for field in FIXED_FIELDS)
    for path, (old, new) in differing(started, resumed).items():
        if path not in _BOUNDS and f"{path}.".startswith(fixed):
            raise ConfigError(
                f"the run in {started.output} was started with {path} {old!r} and cannot be"
                f" resumed with {new!r}; omit it, or start a new run"
            )
    return resumed


def describe_environment() -> dict[str, Any]:
    """Return the versions and machine facts that a reader needs to reproduce figures."""
    import torch

    machine = {
        "python": platform.python_version(),
        "device": _device_name(),
        "threads": torch.get_num_threads(),
    }
    return {**machine, **versions()}


def _device_name() -> str:
    """Return the name of the GPU, or of the CPU, which decides how vLLM's kernels round."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    amx = "with" if torch.cpu._is_amx_tile_supported() else "without"
    return f"{cpu_facts().get('model name', 'CPU')}, {amx} AMX"


def read_metrics(file: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics.jsonl, parsed: one a step.

    A last line without its line feed is left out, because a run is writing it or was killed then.
    Lines end at line feeds alone: JSON may contain other separators, such as U+2028, unescaped. The
    list is empty if there is no file. Raises `ConfigError` for a line that is not JSON.

    last_step: number of the last step. None: all steps.
    """
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else [""]
    metrics: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            step = json.loads(line)
            if not isinstance(step, dict):
                raise ValueError(f"it is of type {type(step).__name__}")
        except ValueError as error:
            raise ConfigError(
                f"{str(file)!r}, line {number}, is not a JSON object ({error}); remove that line"
            ) from error
        metrics.append(step)
    return [line for line in metrics if last_step is None or line["step"] <= last_step]
