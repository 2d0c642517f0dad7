"""QaRL's side of `python -m benchmarks learner`: steps of one model in one scheme on a batch.

    python -m benchmarks.learner.worker '{"model": FOLDER, "batch": FILE, …}'     (see `Job`)

It prints one line of JSON (`Steps`) last. It is a separate process, so that one trainer's memory
does not count for another.
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.learner.batch import Sequences, digest
from benchmarks.learner.job import Job, Steps
from benchmarks.learner.step_memory import StepMemory
from benchmarks.models import PAD
from qarl.bench.process import answer_line


def run(job: Job) -> Steps:
    """Warm up with one step and time `job.steps` more.

    If `job.memory` is set, take one last step and measure its memory.
    """
    if job.variant != "compile":
        # a run without learner.compile disables it too
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sequences = Sequences.load(Path(job.batch))
    import torch

    from qarl.bench.stopwatch import SynchronizedStopwatch
    from qarl.configs.schema.learner import LearnerConfig
    from qarl.learner.batching import make_batch
    from qarl.learner.learner import Learner
    from qarl.quant.checkpoint.load import load_masters
    from qarl.quant.layers.context import LayerContext
    from qarl.quant.model.low_bit_model import LowBitModel
    from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme

    cuda = torch.cuda.is_available()
    dtype = COMPUTE_DTYPES[job.dtype]
    groups = groups_of(sequences)
    memory = StepMemory(cuda)
    masters = load_masters(Path(job.model), torch.float32, torch.device("cuda" if cuda else "cpu"))
    model = LowBitModel(masters, get_scheme(job.setting), LayerContext(dtype, job.kernel))
    learner = Learner(model, LearnerConfig.model_validate(learner_options(job)))
    learner.stopwatch = SynchronizedStopwatch()

    def step(number: int) -> dict[str, float]:
        start = time.perf_counter()
        cpu = time.process_time()
        stats = learner.learn(make_batch(groups, PAD), number)
        seconds = {
            "total": time.perf_counter() - start,
            "cpu": time.process_time() - cpu,
        }
        assert stats.updates == job.updates, f"{stats.updates} of {job.updates} updates were taken"
        return {**stats.seconds, **seconds}

    step(0)
    timed = [step(1 + i) for i in range(job.steps)]
    if job.memory:
        memory.begin()
        step(1 + job.steps)
        memory.end()
    batch = make_batch(groups, PAD)
    seen = digest(row[:n].tolist() for row, n in zip(batch.tokens, batch.length, strict=True))
    return Steps(timed, memory.step, memory.total, seen)


def learner_options(job: Job) -> dict:
    """Return GRPO with clip 0.2 and the mean over each sequence's tokens, and AdamW.

    TRL is configured in the same way.
    """
    return {
        "objective": {"name": "grpo"},
        "optimizer": {
            "name": "adamw",
            "lr": job.lr,
            "weight_decay": 0.0,
            "betas": (0.9, 0.999),
        },
        "mini_batches": job.updates,
        "diagnostics_every": 0,
        "micro_batch_tokens": job.micro_batch_tokens,
        "kernel": job.kernel,
        "gradient_checkpointing": job.variant == "checkpointing",
        "compile": job.variant == "compile",
    }


def groups_of(sequences: Sequences) -> list:
    """Return the batch in the form in which the sampler hands it over."""
    from qarl.rollout.types import Completion, Group, Prompt

    n = sequences.samples
    groups = []
    for i, prompt in enumerate(sequences.prompts):
        rows = range(i * n, (i + 1) * n)
        completions = tuple(
            Completion(
                token_ids=tuple(sequences.completions[r]),
                logprobs=tuple(sequences.logprobs[r]),
                text="",
                weight_version=0,
                finish_reason="stop",
            )
            for r in rows
        )
        groups.append(
            Group(
                Prompt(str(i), "", tuple(prompt)),
                completions,
                tuple(sequences.rewards[r] for r in rows),
            )
        )
    return groups


if __name__ == "__main__":
    task = Job(**json.loads(sys.argv[1]))
    sys.stdout.write(answer_line(run(task)))
