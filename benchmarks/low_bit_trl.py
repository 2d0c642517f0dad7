"""TRL's GRPOTrainer on an exact low-bit policy, TRL alone, and `qarl train`.

python -m benchmarks.low_bit_trl [--steps 100] [--seeds 1] [--json FILE]

TRL is needed; the CPU lock has it. Seconds per step and accuracy are compared on the embedded
default's policy, task and sizes, with TBPO by TRL's options (docs/guide/trl.md) and AdamW.
Each learner runs in a process of its own, one after the other. A step's seconds are the median of
the first seed's steps after the third; accuracy is the mean over the seeds.
"""

# TRL exports its names lazily, and types its trainers' attributes as transformers' own.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import qarl
from qarl.cli.options import json_file, write_json
from qarl.report.metrics import read_metrics
from qarl.report.record import record
from qarl.run.policy import model_folder

_MODEL = "tiny-qwen3"
_LR = 2e-4
_UPDATES = 2
_WARM = 3
_HELD_OUT = 512


def trained_by_qarl(steps: int, seed: int) -> dict[str, Any]:
    """Run `qarl train` with AdamW at TRL's rate and return its figures."""
    adamw = {"name": "adamw", "lr": _LR, "weight_decay": 0.0, "decay_steps": 0}
    options = {f"learner.optimizer.{key}": value for key, value in adamw.items()}
    with tempfile.TemporaryDirectory() as folder:
        run = {
            "steps": steps,
            "seed": seed,
            "output": f"{folder}/run",
            "eval.every": steps,
            "eval.problems": _HELD_OUT,
        }
        outcome = qarl.train(qarl.config(_MODEL, {**run, **options}))
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    seconds = [
        sum(v for k, v in line.items() if k.startswith("seconds/") and k.count("/") == 1)
        for line in lines
    ]
    off = max(line["learn/mismatch/max_abs"] for line in lines)
    return {
        "seconds": median(seconds[_WARM:-1]),
        "accuracy": outcome.export_accuracy,
        "max_abs": off,
    }


def trained_by_trl(low_bit: bool, steps: int, seed: int) -> dict[str, Any]:
    """Run TRL's trainer on an exact low-bit policy, or on its own float32 policy.

    float32 is TRL's quickest dtype on CPUs.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from qarl.integrations.trl import LowBitGRPOTrainer

    settings = qarl.config(_MODEL)
    task = qarl.load_task(settings.task)
    prompts = settings.rollout.prompts
    folder = model_folder(_MODEL)
    problems = [
        p for step in range(steps) for p in task.problems("train", step * prompts, prompts, seed)
    ]
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ended = []

    def reward(completions: Any, number: Any, **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            float(text.strip() == problems[n].answer) for n, text in zip(number, texts, strict=True)
        ]

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % _UPDATES == 0:
                ended.append(time.perf_counter())

    samples = settings.rollout.samples
    args = GRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=prompts * samples // _UPDATES,
        steps_per_generation=_UPDATES,
        num_generations=samples,
        max_completion_length=settings.rollout.max_new_tokens,
        max_steps=steps * _UPDATES,
        learning_rate=_LR,
        lr_scheduler_type="constant",
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=0.1,
        epsilon_high=0.1,
        delta=1.1,
        shuffle_dataset=False,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=seed,
    )
    data = Dataset.from_dict({"prompt": chats, "number": list(range(len(chats)))})
    options: dict[str, Any] = {
        "train_dataset": data,
        "processing_class": tokenizer,
        "callbacks": [Clock()],
    }
    if low_bit:
        policy = qarl.align(_MODEL, settings.scheme)
        options["engine"] = qarl.engine(
            policy, max_prompt_tokens=64, max_new_tokens=8, max_num_seqs=512
        )
        trainer = LowBitGRPOTrainer(policy, reward, args, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = GRPOTrainer(model, reward, args, **options)
    trainer.train()
    held_out = task.problems("heldout", 0, _HELD_OUT, 0)
    if low_bit:
        trainer.sync_weights()
        answers = [answer.text for (answer,) in trainer.engine.generate(held_out, greedy=True)]
    else:
        held_out_chats = [[{"role": "user", "content": problem.question}] for problem in held_out]
        texts = [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in held_out_chats
        ]
        inputs = tokenizer(
            texts,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        tokens = trainer.model.generate(**inputs, do_sample=False, max_new_tokens=8)[
            :, inputs["input_ids"].shape[1] :
        ]
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    right = sum(
        text.strip() == problem.answer for problem, text in zip(held_out, answers, strict=True)
    )
    name = "sampling/sampling_logp_difference/max"
    history = trainer.state.log_history
    seconds = [after - before for before, after in pairwise(ended)]
    off = max((entry[name] for entry in history if name in entry), default=None)
    return {
        "seconds": median(seconds[_WARM:]),
        "accuracy": right / len(held_out),
        "max_abs": off,
    }


LEARNERS = {
    "LowBitGRPOTrainer": lambda steps, seed: trained_by_trl(True, steps, seed),
    "TRL by itself, float32": lambda steps, seed: trained_by_trl(False, steps, seed),
    "qarl train": trained_by_qarl,
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from 0")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=LEARNERS, help="that learner, in this process")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the rows as a record")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(LEARNERS[options.one](options.steps, options.seed)))
        return 0
    rows = []
    for learner in LEARNERS:
        command = [
            sys.executable,
            "-m",
            "benchmarks.low_bit_trl",
            "--steps",
            str(options.steps),
            "--one",
            learner,
        ]
        seeds = []
        for seed in range(options.seeds):
            of_seed = [*command, "--seed", str(seed)]
            output = subprocess.run(of_seed, stdout=subprocess.PIPE, text=True, check=True).stdout
            seeds.append(json.loads(output.splitlines()[-1]))
            print(learner, seed, seeds[-1], flush=True)
        accuracies = [row["accuracy"] for row in seeds]
        off = [row["max_abs"] for row in seeds]
        most = None if None in off else max(off)
        means = {
            "accuracy": fmean(accuracies),
            "accuracies": accuracies,
            "max_abs": most,
        }
        rows.append({"learner": learner, "seconds": seeds[0]["seconds"], **means})
    write_json(options.json, record(sys.argv[1:], rows, "python -m benchmarks.low_bit_trl"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
