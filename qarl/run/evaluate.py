"""Held-out accuracy through an engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.load import overridden
from configs.schema.run import RolloutConfig, RunConfig
from configs.schema.task import TaskConfig
from configs.words import did_you_mean
from learner.processes import Processes
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase
from qarl.run.export_note import LIMITS, export_note, read_note
from qarl.run.prompts import Prompter
from qarl.tasks import Response, Task, load_task
from quant.checkpoint.folder import check_context
from rollout.engine import Engine
from rollout.open import open_engine
from rollout.types import Sampling


def run_accuracy(
    engine: Engine, task: Task, prompter: Prompter, config: RunConfig, processes: Processes | None = None
) -> float:
    """`heldout_accuracy` as a run measures it: by `eval.*`."""
    return heldout_accuracy(
        engine,
        task,
        prompter,
        config.eval.problems,
        config.rollout.max_new_tokens,
        processes=processes,
        samples=config.eval.samples,
        temperature=config.eval.temperature,
    )


def heldout_accuracy(
    engine: Engine,
    task: Task,
    prompter: Prompter,
    problems: int,
    max_new_tokens: int,
    seed: int = 0,
    processes: Processes | None = None,
    samples: int = 1,
    temperature: float = 0.0,
) -> float:
    """Share of the first `problems` held-out problems (of `seed`) answered correctly, greedily, in [0, 1], or of
    `samples` answers to each (avg@samples); each of `processes` asks its own engine a part of them."""
    together = processes or Processes()
    asked = together.share(task.problems("heldout", 0, problems, seed))
    prompts = [prompter.prompt(problem) for problem in asked]
    answers = engine.generate(prompts, Sampling(samples, max_new_tokens, temperature, seed))
    answered = zip(asked, answers, strict=True)
    responses = [Response(problem, a.text, a.token_ids) for problem, given in answered for a in given]
    right = together.concatenated(task.correct(responses))
    return sum(right) / len(right)


@dataclass(frozen=True)
class Evaluation:
    """What is measured: a checkpoint folder through vLLM in `dtype`, on the held-out problems of a task."""

    checkpoint: Path
    task: TaskConfig
    rollout: RolloutConfig
    dtype: str | None


def plan_evaluation(target: str, task: Mapping[str, str], max_new_tokens: int | None, dtype: str | None) -> Evaluation:
    """Task, limits and dtype of a run or of an export that names them (`qarl.run.export_note`), else "chain_sum" with
    its own options, 448 and 64 tokens and the checkpoint's own dtype; what is given comes before either.

    task: dotted overrides of `task.*`; one that names another task starts from that one's defaults. Raises
    `ConfigError` or `ModelError` for a target that is none, and for options that do not apply to it.
    """
    checkpoint, note = _export_of(target, dtype)
    new = max_new_tokens or note.get("max_new_tokens", 64)
    limits = {key: note[key] for key in LIMITS if key in note} or {"max_prompt_tokens": 448}
    rollout = RolloutConfig(**{**limits, "max_new_tokens": new})
    if checkpoint is None:
        from qarl.run.session import model_folder

        checkpoint = model_folder(target)
    check_context(checkpoint, rollout.max_prompt_tokens + new)
    return Evaluation(
        checkpoint=checkpoint,
        task=overridden({"task": note.get("task", {})}, task).task,
        rollout=rollout,
        dtype=dtype or note.get("dtype"),
    )


def _export_of(target: str, dtype: str | None) -> tuple[Path | None, dict[str, Any]]:
    """The folder of a run's export or of a checkpoint, and its note; None for a model to be looked for elsewhere."""
    path = Path(target)
    if (path / "config.yaml").is_file():
        folder = RunFolder.open(path)
        config = folder.config()
        if not folder.export.is_dir():
            raise ConfigError(f"run {target!r} has no export yet; finish it, or: qarl export {target} -o DIR")
        if dtype not in (None, config.dtype):
            raise ConfigError(
                f"--dtype {dtype}: run {target!r} computes in {config.dtype}; leave it out, or evaluate the folder "
                f"{str(folder.export)!r} itself in another dtype"
            )
        note = export_note(path, config, max(folder.steps(), default=0))
        return folder.export, {**note, "dtype": config.dtype}
    if path.is_dir():
        return path, read_note(path)
    if "/" in target and path.parent.is_dir():
        there = sorted(found.name for found in path.parent.iterdir() if found.is_dir())
        near = did_you_mean(path.name, there)
        raise ConfigError(f"there is no folder {target!r} in {str(path.parent)!r}{near}")
    return None, {}


def evaluate(plan: Evaluation, target: str, problems: int, seed: int = 0) -> dict[str, Any]:
    """Accuracy in [0, 1] on the first `problems` held-out problems of `seed`, in a fresh engine, with what it was
    measured on. The reward a run trained with plays no part: accuracy is the task's own verdict."""
    dtype = plan.dtype or _own_dtype(plan.checkpoint)
    prompter = Prompter(plan.checkpoint, plan.rollout.max_prompt_tokens, plan.task.template)
    task = load_task(plan.task.model_copy(update={"reward": None})).shortened(prompter.fits)
    answering = phase(f"starting the engine and answering {problems} problems")
    with answering, open_engine(plan.checkpoint, plan.rollout, dtype) as engine:
        accuracy = heldout_accuracy(engine, task, prompter, problems, plan.rollout.max_new_tokens, seed)
    return {
        "target": target,
        "task": plan.task.model_dump(mode="json"),
        "problems": problems,
        "seed": seed,
        "accuracy": accuracy,
        "dtype": dtype,
    }


def _own_dtype(checkpoint: Path) -> str:
    written = json.loads((checkpoint / "config.json").read_text())
    dtype = written.get("dtype") or written.get("torch_dtype")
    return dtype if dtype == "float16" or (dtype == "float32" and "quantization_config" in written) else "bfloat16"
