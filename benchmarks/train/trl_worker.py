"""TRL's side of `python -m benchmarks train --against trl`.

It runs a complete training by `GRPOTrainer`, in TRL's environment:

    TRL-PYTHON -m benchmarks.train.trl_worker '{"model": FOLDER, "problems": FILE, …}'
    (see `TrlJob`)

`GRPOTrainer.train` runs unchanged, including generation (transformers'). Problems come in QaRL's
order and number per step; the reward is QaRL's function. The trainer's model answers all held-out
problems greedily in one batch.
"""

# TRL exports its names lazily, and types its trainers' attributes as transformers' own.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learner.trl_worker import SETTINGS
from benchmarks.train.clock import Clock
from benchmarks.train.job import Curve, TrlJob
from qarl.bench.process import answer_line


def rows_a_forward(prompt_tokens: int, job: TrlJob) -> int:
    """Return the number of sequences in a forward.

    It is the largest number that divides an update's sequences and stays within the budget of
    tokens when padded, but at least 1. prompt_tokens: length of the longest prompt.
    """
    an_update = job.prompts * job.samples // job.updates
    padded = prompt_tokens + job.max_new_tokens
    fits = max(1, job.micro_batch_tokens // padded)
    return max(n for n in range(1, an_update + 1) if an_update % n == 0 and n <= fits)


def arguments(
    job: TrlJob,
    rows: int,
    output: str,
    cuda: bool,
) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig`.

    They set GRPO with clip 0.2, no KL penalty, AdamW at a constant rate, and an upper bound of 1 on
    the gradient's norm.
    """
    an_update = job.prompts * job.samples // job.updates
    return {
        "output_dir": output,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": an_update // rows,
        "steps_per_generation": job.updates * (an_update // rows),
        "num_generations": job.samples,
        "max_completion_length": job.max_new_tokens,
        "max_steps": job.steps * job.updates,
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "beta": 0.0,
        "seed": job.seed,
        "shuffle_dataset": False,
        "report_to": "none",
        "use_cpu": not cuda,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        **SETTINGS[job.setting],
    }


def run(job: TrlJob) -> Curve:
    """Run the complete training; the curve has answers instead of accuracies."""
    clock = Clock(job.prompts * job.samples)
    answers = []
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from qarl.configs.functions import FunctionKind, load_function
    from qarl.tasks.base import Problem, TaskError

    splits = {
        name: [Problem(**p) for p in split]
        for name, split in json.loads(Path(job.problems).read_text()).items()
    }
    score = load_function(FunctionKind("reward", "taking (problem, text)", TaskError), job.reward)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    chat = tokenizer.chat_template is not None
    longest = max(
        len(ids)
        for ids in _encode(tokenizer, [p.question for p in splits["train"]], chat)["input_ids"]
    )
    cuda = torch.cuda.is_available()

    def prompt(problem: Problem) -> Any:
        return [{"role": "user", "content": problem.question}] if chat else problem.question

    def reward(
        completions: list[Any],
        number: list[int],
        **_: Any,
    ) -> list[float]:
        texts = [completion[0]["content"] if chat else completion for completion in completions]
        return [score(splits["train"][n], text) for n, text in zip(number, texts, strict=True)]

    def answer() -> list[str]:
        held_out = _encode(tokenizer, [p.question for p in splits["heldout"]], chat, padded=True)
        tokens = {name: values.to(trainer.model.device) for name, values in held_out.items()}
        trainer.model.eval()
        with torch.no_grad():
            generated = trainer.model.generate(
                **tokens, do_sample=False, max_new_tokens=job.max_new_tokens
            )
        trainer.model.train()
        return tokenizer.batch_decode(
            generated[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True
        )

    def evaluate(step: int) -> None:
        clock.evaluate()
        answers.append(tuple(answer()))
        clock.evaluated(step, math.nan)

    class Clocked(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                evaluate(0)
                clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step, rest = divmod(state.global_step, job.updates)
            if not rest and (step % job.every == 0 or step == job.steps):
                evaluate(step)

    with tempfile.TemporaryDirectory() as output:
        rows = {
            "prompt": [prompt(p) for p in splits["train"]],
            "number": list(range(len(splits["train"]))),
        }
        trainer: Any = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
            reward_funcs=reward,
            args=GRPOConfig(**arguments(job, rows_a_forward(longest, job), output, cuda)),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            callbacks=[Clocked()],
        )
        trainer.train()
    return dataclasses.replace(clock.curve(), answers=tuple(answers))


def _encode(
    tokenizer: Any,
    questions: list[str],
    chat: bool,
    padded: bool = False,
) -> Any:
    """Encode questions as TRL encodes prompts. padded: pad on the left and return tensors."""
    if chat:
        template = {"tokenize": False, "add_generation_prompt": True}
        questions = [
            tokenizer.apply_chat_template([{"role": "user", "content": q}], **template)
            for q in questions
        ]
    padding = {"padding": True, "padding_side": "left", "return_tensors": "pt"} if padded else {}
    return tokenizer(questions, add_special_tokens=not chat, **padding)


if __name__ == "__main__":
    task = TrlJob(**json.loads(sys.argv[1]))
    sys.stdout.write(answer_line(run(task)))
