"""Held-out greedy accuracy through an engine."""

from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema.run import RolloutConfig
from learner.processes import Processes
from qarl.run.prompts import Prompter
from qarl.tasks import Task, load_task
from rollout.engine import Engine
from rollout.open import open_engine
from rollout.types import Sampling


def heldout_accuracy(
    engine: Engine,
    task: Task,
    prompter: Prompter,
    problems: int,
    max_new_tokens: int,
    seed: int = 0,
    processes: Processes | None = None,
) -> float:
    """Share of the first `problems` held-out problems (of `seed`) answered correctly, greedily, in [0, 1]; each of
    `processes` asks its own engine a part of them."""
    together = processes or Processes()
    asked = together.share(task.problems("heldout", 0, problems, seed))
    prompts = [prompter.prompt(problem) for problem in asked]
    answers = engine.generate(prompts, Sampling(samples=1, max_new_tokens=max_new_tokens, temperature=0.0))
    right = [task.correct(problem, answer[0].text) for problem, answer in zip(asked, answers, strict=True)]
    right = together.concatenated(right)
    return sum(right) / len(right)


def evaluate_target(
    target: str, task_name: str | None, problems: int, max_new_tokens: int | None, dtype: str | None
) -> dict[str, Any]:
    """Accuracy of a run's export, a checkpoint folder, a hub id or an embedded policy, in a fresh engine.

    task_name, max_new_tokens, dtype: None takes the run's, else "chain_sum", 64 and the checkpoint's own dtype
    (bfloat16 where that is float32 and nothing is quantized: masters). Returns accuracy in [0, 1] with what it was
    measured on.
    """
    from qarl.report.run_folder import RunFolder
    from qarl.run.session import model_folder

    if (Path(target) / "config.yaml").is_file():
        folder = RunFolder.open(Path(target))
        config = folder.config()
        if not folder.export.is_dir():
            raise ConfigError(f"run {target!r} has no export yet; finish it, or: qarl export {target} -o DIR")
        checkpoint, rollout, dtype = folder.export, config.rollout, config.dtype
        task = load_task(config.task.name, config.task.options, config.task.reward)
    else:
        checkpoint = model_folder(target)
        rollout = RolloutConfig(max_prompt_tokens=448, max_new_tokens=max_new_tokens or 64)
        dtype = dtype or _own_dtype(checkpoint)
        task = load_task(task_name or "chain_sum", {})
    if task_name:
        task = load_task(task_name, {})
    prompter, longest = Prompter(checkpoint, rollout.max_prompt_tokens), max_new_tokens or rollout.max_new_tokens
    with open_engine(checkpoint, rollout, dtype) as engine:
        accuracy = heldout_accuracy(engine, task, prompter, problems, longest)
    return {
        "target": target,
        "task": task.name,
        "problems": problems,
        "accuracy": accuracy,
        "dtype": dtype,
    }


def _own_dtype(checkpoint: Path) -> str:
    import json

    written = json.loads((checkpoint / "config.json").read_text())
    dtype = written.get("dtype") or written.get("torch_dtype")
    return dtype if dtype == "float16" or (dtype == "float32" and "quantization_config" in written) else "bfloat16"
