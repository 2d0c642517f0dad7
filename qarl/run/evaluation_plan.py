"""From what `qarl eval` is asked to what is measured: the checkpoint, and the task, limits and
settings of the run it comes from. Imports neither torch nor vLLM, but to build an embedded policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.load import is_embedded, overridden
from qarl.configs.schema.run import LONGEST, EvalConfig, RolloutConfig
from qarl.configs.schema.task import TaskConfig
from qarl.configs.words import did_you_mean
from qarl.evaluation.suites import suite_tasks
from qarl.quant.checkpoint.folder import check_context, local_folder, read_config
from qarl.report.run_folder import RunFolder
from qarl.run.export_note import LIMITS, export_note, noted_task, read_note
from qarl.tasks import Task, load_task
from qarl.tasks.rows import short_name

_LIMITS = {"max_prompt_tokens": 448, "max_new_tokens": 64}
"""Where neither a run nor the user says."""
_SUITE_LIMITS = {"max_prompt_tokens": 2048}
_PROBLEMS = 512
_ALL = 10**6
"""Of a suite's benchmarks, which have fewer."""


@dataclass(frozen=True)
class Suite:
    """name: of `qarl.evaluation.suites.SUITES`. folder: of local copies, None for the Hub."""

    name: str
    folder: Path | None


@dataclass(frozen=True)
class Plan:
    """A checkpoint folder through vLLM in `dtype`, on the held-out problems of a task or, with the
    task's system prompt and template, of a suite. target: as the checkpoint was named. asking: how
    many problems, and how they are answered.
    """

    target: str
    checkpoint: Path
    dtype: str
    rollout: RolloutConfig
    task: TaskConfig
    suite: Suite | None
    asking: EvalConfig

    def settings(self, seed: int) -> dict[str, Any]:
        """How questions are asked, by fields' names: what two evaluations must share to be
        compared.
        """
        named = {"max_prompt_tokens", "max_new_tokens", "stop", "loop_limit"}
        limits = self.rollout.model_dump(mode="json", include=named)
        return {
            "seed": seed,
            **limits,
            **self.asking.model_dump(mode="json", exclude={"every"}),
        }

    def tasks(self) -> dict[str, Task]:
        """By name. Raises `TaskError` for what cannot be loaded."""
        if self.suite is not None:
            return suite_tasks(self.suite.name, self.suite.folder, self.task)
        return {
            short_name(self.task.name): load_task(self.task.model_copy(update={"reward": None}))
        }


def plan_evaluation(
    target: str,
    overrides: Mapping[str, str],
    max_new_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    dtype: str | None = None,
    suite: Suite | None = None,
) -> Plan:
    """Task, limits, settings and dtype of a run or of an export that names them
    (`qarl.run.export_note`), else of "chain_sum" with its own options, greedily, in 448 and 64
    tokens and the checkpoint's own dtype; what is given comes before either. A suite is asked
    whole, unless `eval.problems` is given.

    overrides: dotted ones of `task.*` and `eval.*`; one that names another task starts from that
    one's defaults. Raises `ConfigError` or `ModelError` for a target that is none, and for options
    that do not apply to it.
    """
    _check_overrides(overrides)
    own_limits = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
    }
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
    limits: dict[str, Any] = {key: note[key] for key in LIMITS if key in note} or (
        _SUITE_LIMITS if suite else _LIMITS
    )
    rollout = RolloutConfig(**{**limits, **own_limits})
    checkpoint = checkpoint or _model_folder(target)
    check_context(checkpoint, rollout.longest)
    task = noted_task(note, checkpoint).model_dump(mode="json") if note else {}
    asking = note.get("eval", {})
    # a run may have had no evaluation
    problems = _ALL if suite else asking.get("problems") or _PROBLEMS
    chosen = overridden({"task": task, "eval": {**asking, "problems": problems}}, overrides)
    return Plan(
        target=target,
        checkpoint=checkpoint,
        dtype=dtype or note.get("dtype") or _own_dtype(checkpoint),
        rollout=rollout,
        task=chosen.task,
        suite=suite,
        asking=chosen.eval,
    )


def _check_overrides(overrides: Mapping[str, str]) -> None:
    """Raise `ConfigError` for others than those of `task.*` and `eval.*`, and for values out of
    range.
    """
    for field in overrides:
        if not field.startswith(("task.", "eval.")) or field == "eval.every":
            raise ConfigError(
                f"unknown option --{field} of qarl eval; it takes --task.FIELD, --eval.FIELD and"
                " what --help lists"
            )
    # Ranges alone; whether they go together is said when the run's own are known.
    if not overridden({}, {"eval.temperature": "1", **overrides}).eval.problems:
        raise ConfigError("--problems 0 must be at least 1")


def plan_same(plan: Plan, target: str, dtype: str | None = None) -> Plan:
    """Of another target what `plan` asks of its own, in the compute dtype of the other. Raises as
    `plan_evaluation`.
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


def _export_of(target: str, dtype: str | None) -> tuple[Path | None, dict[str, Any]]:
    """The folder of a run's export or of a checkpoint, and its note; None for a model to be looked
    for elsewhere.
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
                f"--dtype {dtype}: run {target!r} computes in {config.dtype}; leave it out, or"
                f" evaluate the folder {str(folder.export)!r} itself in another dtype"
            )
        step = read_note(folder.export).get("step", max(folder.steps(), default=0))
        return folder.export, export_note(path, config, step, folder.export)
    if path.is_dir():
        return path, read_note(path)
    # where runs are, and no owner on the hub
    if "/" in target and (path.parent.is_dir() or path.parts[0] == "runs"):
        there = sorted(sibling.name for sibling in path.parent.glob("*") if sibling.is_dir())
        near = did_you_mean(path.name, there)
        raise ConfigError(
            f"there is no folder {target!r} here{near}; give a run's, a checkpoint's, or an id on"
            " the Hub (owner/name)"
        )
    return None, {}


def _own_dtype(checkpoint: Path) -> str:
    written = read_config(checkpoint)
    dtype = written.get("dtype") or written.get("torch_dtype")
    return (
        dtype
        if dtype == "float16" or (dtype == "float32" and "quantization_config" in written)
        else "bfloat16"
    )
