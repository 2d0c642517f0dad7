"""One scheme's process of `qarl bench speed`: its engine's speed, then whole training steps with
its learners.

    python -m qarl.bench.worker '{"folder": FOLDER, "scheme": NAME, …}'     (see `Job`)

prints one line of JSON (`Answer`) last. Each scheme has its own process, because vLLM allows one
engine per process.
"""

import gc
import itertools
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from pydantic import TypeAdapter

from qarl.bench.job import PHASES, Answer, Cell, Job
from qarl.bench.process import WorkerError, answer_line
from qarl.bench.stopwatch import SynchronizedStopwatch, synchronize
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.rollout import RolloutConfig
from qarl.learner.batching import make_batch
from qarl.learner.learner import Learner
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.open import open_engine
from qarl.rollout.step_times import engine_steps
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher

_FIRST_WORD = 16
"""Smallest token id that prompts are made of; most vocabularies start with special tokens."""
_REPEATS = 3
"""Upper bound on the repeats of a cell."""
_FEWEST_STEPS = 3
"""Lower bound on a cell's engine steps that give every sequence a token."""
_LONG_SECONDS = 1.5
"""Seconds above which a cell is not repeated."""


def run(job: Job) -> Answer:
    """Measure the engine, then steps of each kind.

    Raises `GraphError` for a model that the engine's operators do not fit, because a step with
    other operators is not that of a run, and `WorkerError` if the key/value cache is too small.
    """
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
            cells = [
                _cell(engine, context, batch, job, draw, vocabulary) for context, batch in sizes
            ]
            first, *others = job.kinds
            steps = {first: _steps(engine, first, job, vocabulary)}
            peak = peak_bytes()
            steps |= {kind: _steps(engine, kind, job, vocabulary) for kind in others}
    return Answer(cells, steps, peak)


def peak_bytes() -> int:
    """Return the peak of this process's memory so far, in bytes.

    On a GPU it is the memory that torch allocated, otherwise resident memory.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Linux counts ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rollout(job: Job) -> RolloutConfig:
    return RolloutConfig(
        max_prompt_tokens=job.options.prompt_limit,
        max_new_tokens=job.options.completion_limit,
        max_num_seqs=max(*job.options.batches, job.options.prompts * job.options.samples),
        kv_cache_gib=job.cache_gib,
    )


def _model(job: Job, kind: str) -> LowBitModel:
    """Return the learner's model.

    A plain run has transformers' operators, which are slower. Here it has the engine's, so that it
    differs only in what it multiplies.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masters = load_masters(Path(job.folder), torch.float32, device)
    context = LayerContext(COMPUTE_DTYPES[job.options.dtype], "auto", aligned=kind != "plain")
    return LowBitModel(masters, get_scheme(job.scheme), context, "engine")


def _prompts(
    count: int,
    tokens: int,
    draw: random.Random,
    vocabulary: int,
) -> list[Prompt]:
    """Return prompts of random words, so that no two share a prefix that the engine could cache."""
    first = min(_FIRST_WORD, vocabulary // 2)
    return [
        Prompt(str(n), "", tuple(draw.randrange(first, vocabulary) for _ in range(tokens)))
        for n in range(count)
    ]


def _cell(
    engine: SamplingEngine,
    context: int,
    batch: int,
    job: Job,
    draw: random.Random,
    vocabulary: int,
) -> Cell:
    """Return the engine's seconds for one context and batch.

    Prefill ends with the engine's first step that gives every sequence a token. Each later step
    that does so again is a decoding step. The result is the median step of the quickest repeat.
    """
    sampling = Sampling(1, 1 + job.options.decode_tokens, seed=job.options.seed, ignore_end=True)
    prefills = []
    decodes = []
    for _ in range(_REPEATS):
        prompts = _prompts(batch, context, draw, vocabulary)
        steps = engine_steps(engine, prompts, sampling)
        ends = [step.end for step in steps if step.sequences == batch]
        if len(ends) < _FEWEST_STEPS:
            raise WorkerError(
                f"the engine decoded {batch} sequences of {context} tokens together in {len(ends)}"
                f" of {len(steps)} steps: its key/value cache is too small; lower --batches or"
                " --contexts"
            )
        prefills.append(ends[0])
        intervals = [after - before for before, after in itertools.pairwise(ends)]
        decodes.append(statistics.median(intervals))
        if steps[-1].end > _LONG_SECONDS:
            break
    return Cell(context, batch, min(prefills), min(decodes))


def _steps(
    engine: SamplingEngine,
    kind: str,
    job: Job,
    vocabulary: int,
) -> list[dict[str, float]]:
    """Return the seconds of each phase, for each timed step of one kind.

    A step before them warms up, and proves that the published policy is the learner's.
    """
    model = _model(job, kind)
    optimizer = {"name": job.options.optimizer, "lr": 1e-6}
    options = {
        "optimizer": optimizer,
        "mini_batches": job.options.updates,
        "diagnostics_every": 0,
    }
    learner = Learner(model, LearnerConfig.model_validate(options))
    learner.stopwatch = SynchronizedStopwatch()
    draw = random.Random(job.options.seed + 1)
    sequences = [list(prompt.token_ids) for prompt in _prompts(2, 16, draw, vocabulary)]
    publisher = Publisher(model, engine, sequences, None, canary_every=10**9)
    if model.context.aligned:  # as a run does
        publisher.share_layers()
    numbers = range(1 + job.options.steps)
    seconds = [
        _step(engine, learner, publisher, number, job, draw, vocabulary) for number in numbers
    ]
    publisher.unshare_layers()
    return seconds[1:]


def _step(
    engine: SamplingEngine,
    learner: Learner,
    publisher: Publisher,
    number: int,
    job: Job,
    draw: random.Random,
    vocabulary: int,
) -> dict[str, float]:
    """Sample, learn and publish as a run does, and return the seconds of each of `PHASES`.

    Half of each group is rewarded, so every sequence has an advantage. All completions have the
    same length, so every scheme learns from the same number of tokens.
    """
    prompts = _prompts(job.options.prompts, job.options.prompt_tokens, draw, vocabulary)
    watch = SynchronizedStopwatch()
    gc.collect()
    start = time.perf_counter()
    with watch("sample"):
        sampling = Sampling(
            job.options.samples,
            job.options.tokens,
            seed=job.options.seed + number,
            ignore_end=True,
        )
        completions = engine.generate(prompts, sampling)
    rewards = tuple(float(n % 2) for n in range(job.options.samples))
    pairs = zip(prompts, completions, strict=True)
    groups = [Group(prompt, tuple(answers), rewards) for prompt, answers in pairs]
    stats = learner.learn(make_batch(groups, pad_token=0), number)
    with watch("publish"):
        publisher.publish(number + 1)
    synchronize()
    total = time.perf_counter() - start
    assert stats.updates == job.options.updates, (
        f"{stats.updates} of {job.options.updates} updates were taken"
    )
    phases = dict.fromkeys(PHASES, 0.0) | watch.take() | stats.seconds
    return phases | {"rest": total - sum(phases.values())}


if __name__ == "__main__":
    sys.stdout.write(answer_line(run(TypeAdapter(Job).validate_json(sys.argv[1]))))
