"""Checks of a run's folders, names, model files and task, before torch is imported."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

from qarl.configs.deepspeed_file import read_deepspeed_file
from qarl.configs.errors import ConfigError, InputError
from qarl.configs.load import is_embedded, shipped_names
from qarl.configs.schema.run import RunConfig
from qarl.configs.words import did_you_mean, quoted
from qarl.ptq.compressor import require_llmcompressor
from qarl.quant.checkpoint.check_folder import check_folder
from qarl.quant.checkpoint.folder import hub_config, local_folder
from qarl.report.run_folder import new_path
from qarl.run.replay import check_rollouts
from qarl.tasks import Response, RewardError, Task, load_task


class UnusableRewardError(InputError, heading="reward"):
    """A reward that fails on a reference answer."""


def check_files(config: RunConfig, new: bool = True, dry: bool = False) -> Task:
    """Check output, model folder, task and reward, and return the task.

    This takes milliseconds, or seconds if the task is one of reasoning-gym's, which is imported
    then. `qarl.preflight.prepare` checks what needs the model's architecture or the machine's
    kernels. new: whether the run's folder is to be made. dry: do not ask the Hub for the model.
    Raises the error of the part that is wrong.
    """
    if new:
        check_new_folder(new_path(config), "run folder", "--output")
    if config.log != "none" and find_spec(config.log) is None:
        raise ConfigError(
            f"log {config.log!r} needs the package {config.log}: pip install {config.log}"
        )
    if new and not dry and config.quantization.init is not None:
        require_llmcompressor()
    if config.learner.deepspeed is not None:
        read_deepspeed_file(config.learner.deepspeed)
    if config.from_rollouts is not None:
        check_rollouts(config, config.from_rollouts)
    check_named_model(config, dry)
    return check_task(config)


def check_processes(config: RunConfig, count: int) -> None:
    """Raise `ConfigError` for settings that do not go with this number of processes; nothing is
    loaded for it.
    """
    prompts = config.rollout.prompts
    servers = config.rollout.servers
    init = config.quantization.init
    if prompts % count:
        raise ConfigError(
            f"rollout.prompts {prompts} is not a multiple of {count} processes, which sample as"
            f" many each; take a multiple of {count}, or another number of processes"
        )
    if count > 1 and init is not None:
        raise ConfigError(
            f"quantization.init {init!r} is for one process, not {count}; leave --processes or the"
            " calibrated start out"
        )
    if count > 1 and config.rollout.pictures:
        raise ConfigError(
            f"rollout.pictures {config.rollout.pictures} is for one process, not {count}: what an"
            " engine made of pictures is not sent to the others; leave --processes out, or ask in"
            " text"
        )
    if count == 1 and config.learner.reduce_dtype != "float32":
        raise ConfigError(
            f"learner.reduce_dtype {config.learner.reduce_dtype!r} has no effect in one"
            " process, which sends no gradients; start several with --processes N, or omit it"
        )
    if count > 1 and isinstance(servers, int):
        raise ConfigError(
            f"rollout.servers {servers} would be started by each of {count} processes; start them"
            " once, with `qarl serve-rollouts`, and give their URLs"
        )


def check_new_folder(path: Path, what: str, option: str) -> None:
    """Raise `ConfigError` if a folder exists already or cannot be made.

    what, option: words for the message.
    """
    try:
        exists = path.exists() or path.is_symlink()
    except OSError as error:  # a name longer than the system takes
        raise ConfigError(
            f"cannot make {what} {quoted(str(path))}: {error.strerror}; give another {option}"
        ) from error
    if exists:
        continued = (
            f"continue it with --resume {path}, or " if (path / "config.yaml").is_file() else ""
        )
        raise ConfigError(f"{what} {str(path)!r} exists; {continued}give another {option}")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        # Only an attempt shows what the system allows: read-only disks, other users, quotas. The
        # name is another one, since another run may be making the same folders.
        Path(tempfile.mkdtemp(prefix=".qarl-", dir=parent)).rmdir()
    except OSError as error:
        raise ConfigError(
            f"cannot make {what} {str(path)!r}: {error.strerror}; give another {option}"
        ) from error


def check_task(config: RunConfig) -> Task:
    """Load the task, make problems of every split in use, try its reward on reference answers.

    Returns the task. Raises `UnusableRewardError` if the reward fails.
    """
    task = load_task(config.task)
    problems = task.problems("train", 0, 2, config.seed)
    if config.eval.problems:
        task.problems("heldout", 0, 1, config.seed)
    # two answers: some rewards return one value for all
    answered = [Response(problem, problem.answer) for problem in problems]
    try:
        task.rewards(answered)
        task.correct(answered)
    except RewardError as error:
        tried = "reference answers" if problems[0].answer else "empty completions"
        raise UnusableRewardError(f"tried on {tried}, {error}") from error
    return task


def check_named_model(config: RunConfig, dry: bool = False) -> None:
    """Raise `ModelError` if a model is neither embedded, nor a folder that can be trained, nor on
    the Hub. dry: do not ask the Hub.
    """
    if is_embedded(config.model):
        return
    try:
        folder = local_folder(config.model)
    except InputError as error:
        if Path(config.model).expanduser().exists():
            raise
        embedded = [name for name in shipped_names() if is_embedded(name)]
        near = did_you_mean(config.model, embedded)
        name = config.model
        # such as Qwen3-0.6B, a hub id without its owner
        looks_like_hub_id = (
            "/" not in name
            and "." not in name[:1]
            and any(c.isdigit() for c in name)
            and "-" in name
        )
        hub = f"; a hub id has its owner before it, as in Qwen/{name}" if looks_like_hub_id else ""
        raise type(error)(f"{error}{near or hub}") from error
    if folder is None and not dry:
        # before a task is loaded, and before torch is imported
        hub_config(config.model)
    elif folder is not None:
        check_folder(folder, config.rollout.longest)
