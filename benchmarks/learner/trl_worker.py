"""TRL's side of `python -m benchmarks learner --against trl`.

It runs TRL's training step on QaRL's batch, in TRL's environment:

    TRL-PYTHON -m benchmarks.learner.trl_worker '{"model": FOLDER, "batch": FILE, …}'  (see `Job`)

`GRPOTrainer.train` runs unchanged. Completions enter through its public `rollout_func`. The clock
starts when that returns them, and stops at the callback after the batch's last optimizer step. In
between lies everything TRL does with completions: decoding, rewards and advantages, padding,
log-probs before the update, loss, backward, AdamW.
"""

# TRL exports its names lazily, and types its trainers' attributes as transformers' own.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.learner.batch import Sequences, digest
from benchmarks.learner.job import Job, Steps
from benchmarks.learner.step_memory import StepMemory
from qarl.bench.process import answer_line

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-checkpointing": {"gradient_checkpointing": False},
    "fp32": {"gradient_checkpointing": False, "bf16": False},
}
"""Differences of each setting from TRL's defaults.

The defaults are gradient checkpointing, log-probs chunked over the output head, and fp32 masters
under bf16 autocast. `fp32` computes in float32, which is faster on CPUs without bf16 units.
"""


class Clock:
    """Clock that records seconds, memory and tokens of every batch; the first batch warms up."""

    def __init__(self, job: Job, memory: StepMemory) -> None:
        self._job = job
        self.memory = memory
        self.batches = 0
        self.seconds = []
        self.seen = []

    def begin(self) -> None:
        """Start timing: the completions have arrived."""
        self.batches += 1
        if self._job.memory and self.batches == 1 + self._job.steps + 1:
            self.memory.begin()
        self._start = time.perf_counter()
        self._cpu = time.process_time()

    def end(self) -> None:
        """Stop timing: the batch's last update is done."""
        self._synchronize()
        seconds = {
            "total": time.perf_counter() - self._start,
            "cpu": time.process_time() - self._cpu,
        }
        if 1 < self.batches <= 1 + self._job.steps:
            self.seconds.append(seconds)
        if self._job.memory and self.batches == 1 + self._job.steps + 1:
            self.memory.end()

    def look(self, inputs: dict[str, Any]) -> None:
        """Remember the sequences of a micro-batch during the warm-up."""
        if self.batches == 1:
            parts = (
                inputs[k]
                for k in (
                    "prompt_ids",
                    "prompt_mask",
                    "completion_ids",
                    "completion_mask",
                )
            )
            for prompt, prompt_mask, completion, mask in zip(*parts, strict=True):
                self.seen.append(
                    [
                        *prompt[prompt_mask.bool()].tolist(),
                        *completion[mask.bool()].tolist(),
                    ]
                )

    @staticmethod
    def _synchronize() -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def rows_a_forward(sequences: Sequences, updates: int, budget: int) -> int:
    """Return the number of sequences in a forward.

    It is the largest number that divides an update's sequences and stays within `budget` tokens
    when padded, but at least 1. TRL pads prompts and completions each to their longest, and takes
    the same number of sequences every time.
    """
    an_update = len(sequences.completions) // updates
    padded = max(map(len, sequences.prompts)) + max(map(len, sequences.completions))
    return max(
        n
        for n in range(1, an_update + 1)
        if an_update % n == 0 and (n == 1 or n * padded <= budget)
    )


def arguments(
    job: Job,
    sequences: Sequences,
    output: str,
    cuda: bool,
) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig`.

    They set GRPO with clip 0.2, no KL penalty, AdamW, and an upper bound of 1 on the gradient's
    norm.
    """
    rows = rows_a_forward(sequences, job.updates, job.micro_batch_tokens)
    an_update = len(sequences.completions) // job.updates
    batches = 1 + job.steps + job.memory
    return {
        "output_dir": output,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": an_update // rows,
        "steps_per_generation": job.updates * (an_update // rows),
        "num_generations": sequences.samples,
        "max_completion_length": max(map(len, sequences.completions)),
        "max_steps": batches * job.updates,
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "beta": 0.0,
        "shuffle_dataset": False,
        "report_to": "none",
        "use_cpu": not cuda,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        **SETTINGS[job.setting],
    }


def run(job: Job) -> Steps:
    """Run the same steps as `learner.worker.run`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    sequences = Sequences.load(Path(job.batch))
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    cuda = torch.cuda.is_available()
    clock = Clock(job, StepMemory(cuda))

    class Trainer(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            clock.look(inputs)
            return super()._compute_loss(model, inputs)

    class AtEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % job.updates == 0:
                clock.end()

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        n = sequences.samples
        numbers = [int(p) for p in prompts]  # each prompt n times in a row
        assert numbers == [i for i in range(len(sequences.prompts)) for _ in range(n)], numbers
        generated = {
            "prompt_ids": [sequences.prompts[i] for i in numbers],
            "completion_ids": sequences.completions,
            "logprobs": sequences.logprobs,
        }
        clock.begin()
        return generated

    def reward(completions: list[str], **_: Any) -> list[float]:
        return sequences.rewards

    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
            reward_funcs=reward,
            args=GRPOConfig(**arguments(job, sequences, output, cuda)),
            train_dataset=Dataset.from_dict(
                {"prompt": [str(i) for i in range(len(sequences.prompts))]}
            ),
            processing_class=tokenizer,
            callbacks=[AtEnd()],
            rollout_func=rollout,
        )
        trainer.train()
    return Steps(clock.seconds, clock.memory.step, clock.memory.total, digest(clock.seen))


if __name__ == "__main__":
    task = Job(**json.loads(sys.argv[1]))
    sys.stdout.write(answer_line(run(task)))
