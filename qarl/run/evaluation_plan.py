"""Plan of an evaluation: turns the request of `qarl eval` into a checkpoint with the task, limits
and settings of the run it comes from. This imports neither torch nor vLLM, unless an embedded
policy has to be built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.load import is_embedded, overridden
from qarl.configs.schema.rollout import LONGEST, RolloutConfig
from qarl.configs.schema.run import EvalConfig
from qarl.configs.schema.task import TaskConfig
from qarl.configs.words import did_you_mean
from qarl.evaluation.suites import suite_tasks
from qarl.quant.checkpoint.check_folder import check_context
from qarl.quant.checkpoint.folder import local_folder, read_config
from qarl.report.run_folder import RunFolder
from qarl.run.export_note import LIMITS, export_note, noted_task, read_note
from qarl.tasks import Task, load_task
from qarl.tasks.rows import short_name

_LIMITS = {"max_prompt_tokens": 448, "max_new_tokens": 64}
"""Limits if neither a run nor the user gives any."""
_SUITE_LIMITS = {"max_prompt_tokens": 2048}
"""Limits of a suite, likewise."""
_PROBLEMS = 512
"""Number of held-out problems if neither a run nor the user gives one."""
_ALL = 10**6
"""More problems than any of a suite's benchmarks has."""


@dataclass(frozen=True)
class Suite:
    """A suite of benchmarks."""

    name: str
    """Name in `qarl.evaluation.suites.SUITES`."""
    folder: Path | None
    """Folder with local copies of the benchmarks; None loads them from the Hub."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Evaluation of a checkpoint through vLLM, on the held-out problems of a task or of a suite."""

    target: str
    """The checkpoint as the user named it."""
    checkpoint: Path
    """Folder of the checkpoint."""
    dtype: str
    """Compute dtype of the engine."""
    rollout: RolloutConfig
    """Length limits, stop texts and settings of the engine."""
    task: TaskConfig
    """Task; its system prompt and template also apply to a suite."""
    suite: Suite | None
    """Benchmarks to ask instead of the task's problems."""
    evaluation: EvalConfig
    """Number of problems and samples, and sampling settings."""

    def settings(self, seed: int) -> dict[str, Any]:
        """Return the settings that two evaluations must share to be compared, by field name."""
        named = {"max_prompt_tokens", "max_new_tokens", "stop", "loop_limit"}
        limits = self.rollout.model_dump(mode="json", include=named)
        return {
            "seed": seed,
            **limits,
            **self.evaluation.model_dump(mode="json", exclude={"every"}),
        }

    def tasks(self) -> dict[str, Task]:
        """Load the tasks to ask, by name. Raises `TaskError` for one that cannot be loaded."""
        if self.suite is not None:
            return suite_tasks(self.suite.name, self.suite.folder, self.task)
        without_reward = self.task.model_copy(update={"reward": None})
        return {short_name(self.task.name): load_task(without_reward)}


def plan_evaluation(
    target: str,
    overrides: Mapping[str, str],
    max_new_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    dtype: str | None = None,
    suite: Suite | None = None,
) -> EvaluationPlan:
    """Plan the evaluation of a run, an export or another checkpoint.

    Task, limits, settings and dtype are those of the run, or of the export if it names them
    (`qarl.run.export_note`). Default: "chain_sum" with its own options, greedy sampling, 448 prompt
    tokens, 64 new tokens, and the checkpoint's own dtype. Arguments take precedence over both. All
    problems of a suite are asked unless `eval.problems` is given.

    overrides: fields of `task.*` and `eval.*` by dotted name; one that names another task starts
    from that task's defaults. Raises `ConfigError` or `ModelError` for a target that does not
    exist, and for options that do not apply to it.
    """
    _check_overrides(overrides)
    own_limits = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
    own_limits = {name: value for name, value in own_limits.items() if value is not None}
    for name, value in own_limits.items():
        if not 1 <= value <= LONGEST:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be from 1 to {LONGEST}")
    checkpoint, note = _export_of(target, dtype)
    if suite is not None and max_new_tokens is None and not note:
        raise ConfigError(
            f"--suite {suite.name} of {target!r}, which does not say how long its answers are,"
            " needs --max-new-tokens"
        )
    limits: dict[str, Any] = {key: note[key] for key in LIMITS if key in note}
    if not limits:
        limits = _SUITE_LIMITS if suite else _LIMITS
    rollout = RolloutConfig(**{**limits, **own_limits})
    checkpoint = checkpoint or _model_folder(target)
    check_context(checkpoint, rollout.longest)
    task = noted_task(note, checkpoint).model_dump(mode="json") if note else {}
    settings = note.get("eval", {})
    # The run may have had no held-out evaluation, with 0 problems.
    problems = _ALL if suite else settings.get("problems") or _PROBLEMS
    chosen = overridden({"task": task, "eval": {**settings, "problems": problems}}, overrides)
    return EvaluationPlan(
        target=target,
        checkpoint=checkpoint,
        dtype=dtype or note.get("dtype") or _own_dtype(checkpoint),
        rollout=rollout,
        task=chosen.task,
        suite=suite,
        evaluation=chosen.eval,
    )


def _check_overrides(overrides: Mapping[str, str]) -> None:
    """Raise `ConfigError` for fields outside `task.*` and `eval.*`, and for values out of range."""
    for field in overrides:
        if not field.startswith(("task.", "eval.")) or field == "eval.every":
            raise ConfigError(
                f"unknown option --{field} of qarl eval; it takes --task.FIELD, --eval.FIELD and"
                " what --help lists"
            )
    # Ranges only: how fields go together is checked once the run's own fields are known.
    if not overridden({}, {"eval.temperature": "1", **overrides}).eval.problems:
        raise ConfigError("--problems 0 must be at least 1")


def plan_same(plan: EvaluationPlan, target: str, dtype: str | None = None) -> EvaluationPlan:
    """Return the same plan for another target, in that target's compute dtype.

    Raises what `plan_evaluation` raises.
    """
    checkpoint, note = _export_of(target, dtype)
    checkpoint = checkpoint or _model_folder(target)
    check_context(checkpoint, plan.rollout.longest)
    dtype = dtype or note.get("dtype") or _own_dtype(checkpoint)
    return replace(plan, target=target, checkpoint=checkpoint, dtype=dtype)


def _model_folder(name: str) -> Path:
    folder = None if is_embedded(name) else local_folder(name)
    if folder is not None:
        return folder
    from qarl.run.policy import model_folder

    return model_folder(name)


def _export_of(
    target: str,
    dtype: str | None,
) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder of a run's export or of a checkpoint, and its note.

    The folder is None if `target` is neither, but may be an embedded model or an id on the Hub.
    """
    path = Path(target)
    if (path / "config.yaml").is_file():
        folder = RunFolder.open(path)
        config = folder.config()
        if not folder.export.is_dir():
            folder.require_checkpoint()
            raise ConfigError(
                f"run {target!r} has no export yet; finish it, or: qarl export {target} -o DIR"
            )
        if dtype not in (None, config.dtype):
            raise ConfigError(
                f"--dtype {dtype}: run {target!r} computes in {config.dtype}; omit it, or"
                f" evaluate the folder {str(folder.export)!r} itself in another dtype"
            )
        newest = max(folder.steps(), default=0)
        step = read_note(folder.export).get("step", newest)
        return folder.export, export_note(path, config, step, folder.export)
    if path.is_dir():
        return path, read_note(path)
    # A path into an existing folder or into runs/ is not meant as an id on the Hub.
    if "/" in target and (path.parent.is_dir() or path.parts[0] == "runs"):
        siblings = sorted(sibling.name for sibling in path.parent.glob("*") if sibling.is_dir())
        near = did_you_mean(path.name, siblings)
        raise ConfigError(
            f"there is no folder {target!r} here{near}; give a run's, a checkpoint's, or an id on"
            " the Hub (owner/name)"
        )
    return None, {}


def _own_dtype(checkpoint: Path) -> str:
    """Return the compute dtype of a checkpoint: float16, or float32 if it is quantized, as its
    config.json says; otherwise bfloat16.
    """
    written = read_config(checkpoint)
    dtype = written.get("dtype") or written.get("torch_dtype")
    if dtype == "float16" or (dtype == "float32" and "quantization_config" in written):
        return dtype
    return "bfloat16"
