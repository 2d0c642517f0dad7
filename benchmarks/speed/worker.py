"""One scheme's process of the benchmark: its engine's speed, then whole training steps with a learner beside it.

    python -m benchmarks.speed.worker '{"folder": FOLDER, "scheme": NAME, …}'     (see `Job`)

prints one line of JSON (`Answer`) last. A process of its own, for vLLM allows one engine in each.
"""

import gc
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks.process import WorkerError, answer_line
from benchmarks.speed.job import PHASES, Answer, Cell, Job
from benchmarks.stopwatch import SynchronizedStopwatch
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.run import RolloutConfig
from qarl.learner.batching import make_batch
from qarl.learner.learner import Learner
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.rollout.vllm.engine import vllm_requests
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher

_FIRST_WORD = 16
"""Special tokens sit at the start of most vocabularies."""

_REPEATS = 3
_LEAST_STEPS = 3
_LONG_SECONDS = 1.5
"""A cell that took longer is not repeated."""


def run(job: Job) -> Answer:
    """Everything, in the order engine, steps of each kind. Raises `GraphError`, as a run by `learner.operators engine`
    does, for a model without the engine's operators: with others, other work would be timed."""
    with tempfile.TemporaryDirectory(prefix="qarl-bench-") as folder:
        model = _model(job, "qarl")
        vocabulary = model.config.vocab_size
        checkpoint = Path(folder) / "checkpoint"
        export_checkpoint(model, Path(job.folder), checkpoint)
        del model
        gc.collect()
        with open_engine(checkpoint, _rollout(job), job.options.dtype) as engine:
            draw = random.Random(job.options.seed)
            sizes = itertools.product(job.options.contexts, job.options.batches)
            cells = [_cell(engine, context, batch, job, draw, vocabulary) for context, batch in sizes]
            steps = {kind: _steps(engine, kind, job, vocabulary) for kind in job.kinds}
    return Answer(cells, steps)


def _rollout(job: Job) -> RolloutConfig:
    longest = max(*job.options.contexts, job.options.prompt_tokens)
    return RolloutConfig(
        max_prompt_tokens=longest,
        max_new_tokens=max(job.options.decode_tokens + 1, job.options.tokens),
        max_num_seqs=max(*job.options.batches, job.options.prompts * job.options.samples),
        kv_cache_gib=job.cache_gib,
    )


def _model(job: Job, kind: str) -> LowBitModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masters = load_masters(Path(job.folder), torch.float32, device)
    context = LayerContext(COMPUTE_DTYPES[job.options.dtype], job.options.kernel, aligned=kind != "plain")
    # A plain run takes transformers' operators, which are slower; here it is to differ in what it multiplies alone.
    return LowBitModel(masters, get_scheme(job.scheme), context, "engine")


def _prompts(count: int, tokens: int, draw: random.Random, vocabulary: int) -> list[Prompt]:
    """Of random words, so that no two share a prefix the engine could keep."""
    first = min(_FIRST_WORD, vocabulary // 2)
    return [Prompt(str(n), "", tuple(draw.randrange(first, vocabulary) for _ in range(tokens))) for n in range(count)]


def sampled_by_step(engine: Any, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[int]:
    """What `VllmEngine.generate` does, a step of the engine at a time: after each, how many sequences it gave a token.
    Exhaust it before any other call."""
    from vllm.inputs import tokens_input

    vllm = engine._llm.llm_engine
    for number, (prompt, params) in enumerate(zip(*vllm_requests(prompts, sampling), strict=True)):
        vllm.add_request(str(number), tokens_input(prompt["prompt_token_ids"]), params)
    while vllm.has_unfinished_requests():
        yield len(vllm.step())  # one output a sequence that got a token


def _cell(engine: Any, context: int, batch: int, job: Job, draw: random.Random, vocabulary: int) -> Cell:
    """engine: vLLM in this process. Prefill is up to the first step of the engine that gives
    every sequence a token; each step after it that does so again is decoding. Of a repeat the median step counts, of
    the repeats the quickest."""
    sampling = Sampling(1, 1 + job.options.decode_tokens, seed=job.options.seed, ignore_end=True)
    prefills, decodes = [], []
    for _ in range(_REPEATS):
        prompts = _prompts(batch, context, draw, vocabulary)
        start = time.perf_counter()
        ends = [(time.perf_counter(), sequences) for sequences in sampled_by_step(engine, prompts, sampling)]
        whole = [end for end, sequences in ends if sequences == batch]
        if len(whole) < _LEAST_STEPS:
            raise WorkerError(
                f"the engine decoded {batch} sequences of {context} tokens at once in {len(whole)} of {len(ends)} "
                "steps: its key/value cache is too small; lower --batches or --contexts"
            )
        prefills.append(whole[0] - start)
        decodes.append(statistics.median(after - before for before, after in itertools.pairwise(whole)))
        if ends[-1][0] - start > _LONG_SECONDS:
            break
    return Cell(context, batch, min(prefills), min(decodes))


def _steps(engine: Engine, kind: str, job: Job, vocabulary: int) -> list[dict[str, float]]:
    """Timed steps of one kind, after one that warms up and proves the published policy to be the learner's."""
    model = _model(job, kind)
    optimizer = {"name": job.options.optimizer, "lr": 1e-6}
    options = {"optimizer": optimizer, "mini_batches": job.options.updates, "kernel": job.options.kernel}
    learner = Learner(model, LearnerConfig.model_validate({**options, "diagnostics_every": 0}))
    learner.stopwatch = SynchronizedStopwatch()
    draw = random.Random(job.options.seed + 1)
    sequences = [list(prompt.token_ids) for prompt in _prompts(2, 16, draw, vocabulary)]
    publisher = Publisher(model, engine, sequences, get_scheme(job.scheme).bound, canary_every=10**9)
    if model.context.aligned and job.options.kernel in ("auto", "vllm"):  # as a run does
        publisher.share_layers()
    _step(engine, learner, publisher, 0, job, draw, vocabulary)
    seconds = [_step(engine, learner, publisher, 1 + n, job, draw, vocabulary) for n in range(job.options.steps)]
    publisher.unshare()
    return seconds


def _step(
    engine: Engine, learner: Learner, publisher: Publisher, number: int, job: Job, draw: random.Random, vocabulary: int
) -> dict[str, float]:
    """sample → learn → publish, as a run does it. Half of each group is rewarded, so every sequence teaches, and all
    completions have one length, so every scheme learns from as many tokens."""
    prompts = _prompts(job.options.prompts, job.options.prompt_tokens, draw, vocabulary)
    watch = SynchronizedStopwatch()
    gc.collect()
    start = time.perf_counter()
    with watch("sample"):
        sampling = Sampling(job.options.samples, job.options.tokens, seed=job.options.seed + number, ignore_end=True)
        completions = engine.generate(prompts, sampling)
    rewards = tuple(float(n % 2) for n in range(job.options.samples))
    groups = [Group(p, tuple(c), rewards) for p, c in zip(prompts, completions, strict=True)]
    stats = learner.learn(make_batch(groups, pad_token=0), number)
    with watch("publish"):
        publisher.publish(number + 1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    total = time.perf_counter() - start
    assert stats.updates == job.options.updates, f"{stats.updates} of {job.options.updates} updates were taken"
    phases = dict.fromkeys(PHASES, 0.0) | watch.take() | stats.seconds
    return phases | {"rest": total - sum(phases.values())}


if __name__ == "__main__":
    sys.stdout.write(answer_line(run(TypeAdapter(Job).validate_json(sys.argv[1]))))
