"""TRL's GRPOTrainer on an exact low-bit policy, TRL alone, and `qarl train`.

python -m benchmarks.low_bit_trl [--seeds N] [--output FOLDER] [--json FILE] [--FIELD VALUE ...]

TRL is needed; the CPU lock has it. All three learn from the same masters, on the same questions in
the same order, by AdamW. Every field of a configuration is an option by its dotted name, and TRL
takes over model, scheme, task, rollout, steps, updates a step, objective (TBPO by TRL's options,
docs/guide/trl.md, or GRPO) and optimizer. TRL alone samples by transformers.

What each would deploy, a checkpoint in the scheme, is then evaluated in a process of its own by
vLLM (`qarl.evaluate`), and so is the policy before training. TRL alone deploys its masters rounded
to the nearest codes; its masters in the compute dtype are evaluated, too. Its |Δ log p| is between
its own model and the deployed one, of its last batch; the others' are between learner and sampler
while they train.

Each training runs in a process of its own, one after the other. A step's seconds are the median of
the steps after the third; CPU seconds are a mean of all steps, without evaluations. With --output,
what is finished stays there, and a second call continues. The record has what is finished.
"""

# TRL exports its names lazily, and types its trainers' attributes as transformers' own.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import qarl
from benchmarks.learner.trl_worker import SETTINGS
from benchmarks.train.worker import run as timed_run
from qarl.cli.options import dotted_overrides, json_file, whole, write_json
from qarl.cli.parser import Parser, normalized_argv
from qarl.configs.errors import ConfigError
from qarl.configs.schema.objectives import GrpoConfig, TbpoConfig
from qarl.configs.schema.run import RunConfig
from qarl.report.record import record
from qarl.report.run_folder import read_metrics
from qarl.run.policy import model_folder
from qarl.tasks import Response

_DEFAULTS = {
    "model": "tiny-qwen3",
    "steps": "100",
    "learner.optimizer.name": "adamw",
    "learner.optimizer.lr": "2e-4",
    "learner.optimizer.weight_decay": "0.0",
    "learner.optimizer.decay_steps": "0",
    "eval.problems": "512",
}
"""Fields that differ from the model's own configuration, unless given."""
_WARM = 3
_DEPLOYED = "deployed"
_MASTERS = "masters"
_ROW = "row.json"


def before_training(settings: RunConfig, folder: Path) -> dict[str, Any]:
    """Write the checkpoint of the masters before any update; there is nothing to time."""
    policy = qarl.align(settings.model, settings.scheme, dtype=settings.dtype)
    policy.export(folder / _DEPLOYED)
    (folder / _MASTERS).symlink_to(model_folder(settings.model).absolute())
    return {}


def trained_by_qarl(settings: RunConfig, folder: Path) -> dict[str, Any]:
    """Train as `qarl train` does, and return its figures."""
    run = folder / "run"
    tree: dict[str, Any] = settings.model_dump(mode="json") | {"output": str(run)}
    tree["eval"] |= {"problems": 1, "every": settings.steps}
    tree["checkpoint"] |= {"every": settings.steps}
    end = timed_run(tree).points[-1]
    (folder / _DEPLOYED).symlink_to((run / "export").absolute())
    lines = read_metrics(run / "metrics.jsonl")
    # a batch whose rewards are equal in every group teaches nothing, and its step has no such field
    learned = [line for line in lines if "learn/mismatch/mean_abs" in line]
    seconds = [
        sum(v for k, v in line.items() if k.startswith("seconds/") and k.count("/") == 1)
        for line in lines
    ]
    return {
        "seconds": median(seconds[_WARM:-1] or seconds),
        "cpu_seconds": end.cpu_seconds / settings.steps,
        "mean_abs": fmean(line["learn/mismatch/mean_abs"] for line in learned),
        "max_abs": max(line["learn/mismatch/max_abs"] for line in learned),
        "rewards": [line["reward"] for line in lines],
    }


def trl_arguments(settings: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments of TRL's `GRPOConfig` that say what the configuration says."""
    objective = settings.learner.objective
    if isinstance(objective, TbpoConfig):
        loss = {
            "importance_sampling_level": "sequence",
            "epsilon": objective.delta_low,
            "epsilon_high": objective.epsilon_high,
            "delta": 1 + objective.delta_high,
        }
    elif type(objective) is GrpoConfig:
        loss = {"epsilon": objective.clip_low, "epsilon_high": objective.clip_high}
    else:
        raise ConfigError(f"objective {objective.name!r}: TRL's options are known of tbpo and grpo")
    optimizer = settings.learner.optimizer
    if optimizer.name != "adamw" or optimizer.decay_steps or optimizer.warmup_steps:
        raise ConfigError("TRL learns by AdamW at a constant rate here: set --optimizer adamw")
    updates = settings.learner.mini_batches
    rollout = settings.rollout
    return loss | {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": rollout.prompts * rollout.samples // updates,
        "steps_per_generation": updates,
        "num_generations": rollout.samples,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "max_steps": settings.steps * updates,
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "max_grad_norm": optimizer.grad_clip,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "beta": 0.0,
        "shuffle_dataset": False,
        "report_to": "none",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": settings.seed,
    }


def trained_by_trl(
    low_bit: bool, settings: RunConfig, folder: Path, setting: str = "fp32"
) -> dict[str, Any]:
    """Run TRL's trainer on an exact low-bit policy, or on its own policy.

    setting: dtype and checkpointing, by a name in `benchmarks.learner.trl_worker.SETTINGS`.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from qarl.integrations.trl import LowBitGRPOTrainer

    task = qarl.load_task(settings.task)
    rollout = settings.rollout
    model = model_folder(settings.model)
    problems = task.problems("train", 0, settings.steps * rollout.prompts, settings.seed)
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    updates = settings.learner.mini_batches
    ended: list[tuple[float, float]] = []

    def reward(completions: Any, number: Any, **_: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        return task.rewards(
            [Response(problems[n], text) for n, text in zip(number, texts, strict=True)]
        )

    class Clock(TrainerCallback):
        """Takes the time at which the first step begins, and at which every step ends."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not ended:
                self.take()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                self.take()

        def take(self) -> None:
            ended.append((time.perf_counter(), time.process_time()))

    args = GRPOConfig(**trl_arguments(settings, folder), **SETTINGS[setting])
    options: dict[str, Any] = {
        "train_dataset": Dataset.from_dict({"prompt": chats, "number": list(range(len(chats)))}),
        "processing_class": AutoTokenizer.from_pretrained(model),
        "callbacks": [Clock()],
    }
    if low_bit:
        policy = qarl.align(settings.model, settings.scheme, dtype=settings.dtype)
        options["engine"] = qarl.engine(
            policy,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            max_num_seqs=rollout.max_num_seqs,
        )
        trainer = LowBitGRPOTrainer(policy, reward, args, **options)
    else:
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        trainer = GRPOTrainer(module, reward, args, **options)
    trainer.train()
    seconds = [after[0] - before[0] for before, after in pairwise(ended)]
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    if low_bit:
        policy.export(folder / _DEPLOYED)
        name = "sampling/sampling_logp_difference"
        mismatch = {
            "mean_abs": fmean(entry[f"{name}/mean"] for entry in history),
            "max_abs": max(entry[f"{name}/max"] for entry in history),
        }
    else:
        trainer.save_model(str(folder / _MASTERS))
        mismatch = deployed_by_trl(trainer, settings, folder)
    return {
        "seconds": median(seconds[_WARM:] or seconds),
        "cpu_seconds": (ended[-1][1] - ended[0][1]) / settings.steps,
        **mismatch,
        "rewards": [entry["reward"] for entry in history],
    }


def deployed_by_trl(trainer: Any, settings: RunConfig, folder: Path) -> dict[str, float]:
    """Export what TRL trained alone, rounded to the nearest codes, and return how far the log-probs
    of its model are from it on its last batch, nats a token.
    """
    policy = qarl.align(str(folder / _MASTERS), settings.scheme, dtype=settings.dtype)
    policy.export(folder / _DEPLOYED)
    differences = []
    with torch.no_grad():
        for batch in trainer._buffered_inputs:
            length = batch["completion_ids"].shape[1]
            tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            learner = trainer._get_per_token_logps_and_entropies(
                trainer.model, tokens, attended, length
            )[0]
            deployed = policy.logprobs(
                tokens, attention_mask=attended, temperature=trainer.temperature
            )[0][:, -length:]
            differences.append((learner - deployed).abs()[batch["completion_mask"].bool()])
    every = torch.cat(differences)
    return {"mean_abs": every.mean().item(), "max_abs": every.max().item()}


LEARNERS = {
    "before training": lambda settings, folder, _: before_training(settings, folder),
    "LowBitGRPOTrainer": lambda settings, folder, _: trained_by_trl(True, settings, folder),
    "TRL by itself": partial(trained_by_trl, False),
    "qarl train": lambda settings, folder, _: trained_by_qarl(settings, folder),
}


def evaluated(settings: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the held-out accuracy of a checkpoint by greedy answers."""
    problems = {"eval.problems": settings.eval.problems}
    task = {
        f"task.{name}": value
        for name in ("name", "options", "correct", "reward")
        if (value := getattr(settings.task, name))
    }
    rollout = settings.rollout
    evaluation = qarl.evaluate(
        folder,
        problems | task,
        max_new_tokens=rollout.max_new_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        dtype=settings.dtype,
    )
    (result,) = evaluation.results
    return {"accuracy": result.accuracy, "asked": len(result.questions)}


def chosen(arguments: list[str]) -> RunConfig:
    """Return the configuration that the dotted options choose."""
    overrides = _DEFAULTS | dotted_overrides(argparse.Namespace(), arguments)
    return qarl.config(overrides["model"], overrides)


def row_of(
    learner: str, seed: int, folder: Path, setting: str, fields: list[str]
) -> dict[str, Any]:
    """Train and evaluate in processes of their own, and return the row, which `folder` has at the
    end.
    """
    file = folder / _ROW
    if file.exists():
        return json.loads(file.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def answer(*what: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.low_bit_trl", *what, *fields]
        output = subprocess.run(
            [*command, f"--seed={seed}"], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        return json.loads(output.splitlines()[-1])

    row = {"learner": learner, "seed": seed}
    row |= answer("--one", learner, "--output", str(folder), "--trl-setting", setting)
    row |= answer("--evaluate", str(folder / _DEPLOYED))
    if (folder / _MASTERS).exists():
        row["unquantized"] = answer("--evaluate", str(folder / _MASTERS))["accuracy"]
    file.write_text(json.dumps(row))
    return row


def main() -> int:
    """Measure and print."""
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(fields=True)
    parser.add_argument("--seeds", type=whole(1), default=1, help="so many, from 0")
    parser.add_argument("--one", choices=LEARNERS, help=argparse.SUPPRESS)
    parser.add_argument("--evaluate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--trl-setting",
        choices=SETTINGS,
        default="fp32",
        help="TRL by itself: fp32 or bf16 autocast without checkpointing, or TRL's default",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep what is trained there")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the rows as a record")
    options, fields = parser.parse_known_args(normalized_argv(sys.argv[1:]))
    setting = options.trl_setting
    settings = chosen(fields)
    if options.one:
        print(json.dumps(LEARNERS[options.one](settings, options.output, setting)))
        return 0
    if options.evaluate:
        print(json.dumps(evaluated(settings, options.evaluate)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        cells = [
            (learner, seed, folder / f"{seed}-{number}")
            for seed in range(options.seeds)
            for number, learner in enumerate(LEARNERS)
            if number or not seed  # every seed begins at the same policy
        ]
        for learner, seed, cell in cells:
            print(row_of(learner, seed, cell, setting, fields), flush=True)
            files = [finished / _ROW for _, _, finished in cells]
            rows = [json.loads(file.read_text()) for file in files if file.exists()]
            write_json(options.json, record(sys.argv[1:], rows, "python -m benchmarks.low_bit_trl"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
