"""One scheme's process of `qarl bench speed`: its engine's speed, then whole training steps with a learner beside it.

    python -m qarl.bench.speed.worker '{"model": FOLDER, "scheme": NAME, …}'     (see `Job`)

prints one line of JSON (`Answer`) last. A process of its own, for vLLM allows one engine in each.
"""

import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from qarl.bench.answer import answer_line
from qarl.bench.process import WorkerError
from qarl.bench.speed.job import CLOCKS, PHASES, Answer, Cell, Job, Memory
from qarl.bench.speed.roofline import measure_machine, synchronize
from qarl.bench.step_memory import StepMemory
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.run import RolloutConfig
from qarl.learner.batching import make_batch
from qarl.learner.learner import Learner
from qarl.learner.stopwatch import Stopwatch
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.operators.decoder import why_not
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher

_FIRST_WORD = 16
"""Special tokens sit at the start of most vocabularies."""

_REPEATS = 3
_LEAST_STEPS = 3
_LONG_SECONDS = 1.5
"""A cell that took longer is not repeated."""


def run(job: Job) -> Answer:
    """Everything, in the order machine, engine, steps of each kind."""
    machine = measure_machine(CLOCKS[job.clock])
    before = StepMemory(torch.cuda.is_available())
    with tempfile.TemporaryDirectory(prefix="qarl-bench-") as folder:
        model = _model(job, "qarl")
        vocabulary = model.config.vocab_size
        checkpoint = Path(folder) / "checkpoint"
        export_checkpoint(model, Path(job.model), checkpoint)
        del model
        gc.collect()
        resident = _resident()
        with open_engine(checkpoint, _rollout(job), job.dtype) as engine:
            growth = _resident() - resident
            draw = random.Random(job.seed)
            cells = [_cell(engine, context, b, job, draw, vocabulary) for context in job.contexts for b in job.batches]
            steps, memory = {}, {}
            for kind in job.kinds:
                steps[kind], memory[kind] = _steps(engine, kind, job, vocabulary, before, growth)
    return Answer(asdict(machine), cells, steps, memory if job.memory else {})


def _rollout(job: Job) -> RolloutConfig:
    longest = max(*job.contexts, job.prompt_tokens)
    return RolloutConfig(
        max_prompt_tokens=longest,
        max_new_tokens=max(job.decode_tokens + 1, job.tokens),
        max_num_seqs=max(*job.batches, job.prompts * job.samples),
        kv_cache_gib=job.cache_gib,
    )


def _model(job: Job, kind: str) -> LowBitModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masters = load_masters(Path(job.model), torch.float32, device)
    context = LayerContext(COMPUTE_DTYPES[job.dtype], job.kernel, aligned=kind != "plain")
    # A plain run takes transformers' operators, which are slower; here it is to differ in what it multiplies alone.
    operators = "transformers" if why_not(masters) else "engine"
    return LowBitModel(masters, get_scheme(job.scheme), context, operators)


def _prompts(count: int, tokens: int, draw: random.Random, vocabulary: int) -> list[Prompt]:
    """Of random words, so that no two share a prefix the engine could keep."""
    first = min(_FIRST_WORD, vocabulary // 2)
    return [Prompt(str(n), "", tuple(draw.randrange(first, vocabulary) for _ in range(tokens))) for n in range(count)]


def _cell(engine: Any, context: int, batch: int, job: Job, draw: random.Random, vocabulary: int) -> Cell:
    """engine: one in process, which has `sampled_by_step`. Prefill is up to the first step of the engine that gives
    every sequence a token; each step after it that does so again is decoding. Of a repeat the median step counts, of
    the repeats the quickest."""
    clock, sampling = CLOCKS[job.clock], Sampling(1, 1 + job.decode_tokens, seed=job.seed, ignore_end=True)
    prefills, decodes = [], []
    for _ in range(_REPEATS):
        prompts = _prompts(batch, context, draw, vocabulary)
        start = clock()
        ends = [(clock(), sequences) for sequences in engine.sampled_by_step(prompts, sampling)]
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


def _steps(
    engine: Engine, kind: str, job: Job, vocabulary: int, memory: StepMemory, engine_bytes: int
) -> tuple[list[dict[str, float]], Memory]:
    """Timed steps of one kind, after one that warms up and proves the published policy to be the learner's."""
    model = _model(job, kind)
    learner = Learner(model, LearnerConfig.model_validate(_learner_options(job)))
    learner.stopwatch = _watch(job)
    draw = random.Random(job.seed + 1)
    sequences = [list(prompt.token_ids) for prompt in _prompts(2, 16, draw, vocabulary)]
    publisher = Publisher(model, engine, sequences, get_scheme(job.scheme).bound, canary_every=10**9)
    if model.context.aligned and job.kernel in ("auto", "vllm"):  # as a run does
        publisher.share_layers()

    def step(number: int) -> dict[str, float]:
        return _step(engine, learner, publisher, number, job, draw, vocabulary)

    step(0)
    seconds = [step(1 + n) for n in range(job.steps)]
    peak = 0
    if job.memory:
        memory.begin()
        step(1 + job.steps)
        memory.end()
        peak = memory.total
    publisher.unshare()
    return seconds, Memory(
        masters=sum(master.nbytes for master in model.masters.values()),
        optimizer=_tensor_bytes(learner.backend.state_dict()["optimizer"]),
        codes=sum(item.tensor.nbytes for item in model.low_bit_tensors()),
        engine=engine_bytes,
        cache=job.cache_gib * 2**30 if not torch.cuda.is_available() else 0,
        peak=peak,
    )


def _step(
    engine: Engine, learner: Learner, publisher: Publisher, number: int, job: Job, draw: random.Random, vocabulary: int
) -> dict[str, float]:
    """sample → learn → publish, as a run does it. Half of each group is rewarded, so every sequence teaches, and all
    completions have one length, so every scheme learns from as many tokens."""
    prompts = _prompts(job.prompts, job.prompt_tokens, draw, vocabulary)
    watch, clock = _watch(job), CLOCKS[job.clock]
    gc.collect()
    start = clock()
    with watch("sample"):
        sampling = Sampling(job.samples, job.tokens, seed=job.seed + number, ignore_end=True)
        completions = engine.generate(prompts, sampling)
    rewards = tuple(float(n % 2) for n in range(job.samples))
    groups = [Group(p, tuple(c), rewards) for p, c in zip(prompts, completions, strict=True)]
    stats = learner.learn(make_batch(groups, pad_token=0), number)
    with watch("publish"):
        publisher.publish(number + 1)
    synchronize()
    total = clock() - start
    assert stats.updates == job.updates, f"{stats.updates} of {job.updates} updates were taken"
    phases = dict.fromkeys(PHASES, 0.0) | watch.take() | stats.seconds
    return phases | {"rest": total - sum(phases.values())}


def _learner_options(job: Job) -> dict[str, Any]:
    return {
        "optimizer": {"name": job.optimizer, "lr": 1e-6},
        "mini_batches": job.updates,
        "diagnostics_every": 0,
        "kernel": job.kernel,
    }


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_tensor_bytes, parts))


def _resident() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _watch(job: Job) -> Stopwatch:
    watch = Stopwatch(clock=CLOCKS[job.clock])
    watch.synchronize = torch.cuda.is_available()
    return watch


if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    tuples = {name: tuple(words[name]) for name in ("batches", "contexts", "kinds")}
    sys.stdout.write(answer_line(run(Job(**words | tuples))))
