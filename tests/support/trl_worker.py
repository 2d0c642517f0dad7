"""One process of TRL's trainer in `tests/runs/test_trl.py`, forked with torchrun's environment."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

import qarl
from qarl.integrations.trl import LowBitGRPOTrainer

COMPLETIONS = 16
"""Completions of a step, over all processes."""


def main(file: Path) -> None:
    """Train a policy for two steps, and write what this process sampled and its masters.

    file: a JSON object with model, a folder, and output, the beginning of the results' names.
    """
    job = json.loads(file.read_text())
    world = int(os.environ["WORLD_SIZE"])
    answers: list[list[str]] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        answers.append([completion[0]["content"] for completion in completions])
        return [float(len(set(answer))) for answer in answers[-1]]

    args = GRPOConfig(
        job["output"],
        per_device_train_batch_size=COMPLETIONS // world,
        num_generations=4,
        steps_per_generation=1,
        max_completion_length=8,
        learning_rate=1e-3,
        max_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    policy = qarl.align(job["model"], "w4a16")
    prompts = [[{"role": "user", "content": f"{n} + {n} ="}] for n in range(1, 9)]
    trainer = LowBitGRPOTrainer(
        policy, reward, args, train_dataset=Dataset.from_dict({"prompt": prompts})
    )
    trainer.train()
    trainer.engine.close()
    name = "sampling/sampling_logp_difference/max"
    results = {
        "masters": [master.detach() for master in policy.parameters()],
        "answers": answers,
        "mismatch": [log[name] for log in trainer.state.log_history if name in log],
    }
    torch.save(results, f"{job['output']}-{os.environ['RANK']}.pt")
