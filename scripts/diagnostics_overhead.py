"""What diagnostics cost a learner's step: OMP_NUM_THREADS=1 python scripts/diagnostics_overhead.py [--aligned false …]

One process, two learners of the embedded policy on the same batches in turn: one that measures at every step, and one
that does not. Printed: the median of the paired ratios, a tenth of it (`learner.diagnostics_every` 10), and what the
measures of every step take (mismatch, clip reasons, ages), all as shares of the step's learning. Sampling and
publishing come on top, so the share of a step is smaller. Options are fields of `learner.*`.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.ages import Ages
from qarl.learner.batching import Batch, make_batch
from qarl.learner.learner import Learner
from qarl.learner.loss.tokens import clip_reasons, clipped_sides
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.processes import Processes
from qarl.learner.token_log import TokenLog
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import MASTER_DTYPES, get_scheme
from qarl.rollout.types import Completion, Group, Prompt
from qarl.run.session import model_folder

PROMPTS, SAMPLES, PAIRS = 32, 8, 15


def learner_of(options: dict[str, str], every: int) -> Learner:
    """The embedded policy in w4a16, in bfloat16."""
    config = LearnerConfig.model_validate({**options, "diagnostics_every": every})
    compute = MASTER_DTYPES[config.compute_dtype] if config.compute_dtype else None
    masters = load_masters(model_folder("tiny-qwen3"), torch.float32)
    context = LayerContext(torch.bfloat16, config.kernel, config.aligned, compute)
    return Learner(LowBitModel(masters, get_scheme("w4a16"), context, config.operators), config)


def batch_of(seed: int, vocabulary: int) -> Batch:
    """Prompts of 12 tokens, answers of 3 to 60, with rewards of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(16, vocabulary, (count,), generator=generator).tolist())

    def answer() -> Completion:
        tokens = drawn(int(torch.randint(3, 61, (1,), generator=generator)))
        return Completion(tokens, tuple(-float(t % 7) for t in tokens), "", 0, "stop")

    def group(number: int) -> Group:
        rewards = torch.randint(0, 2, (SAMPLES,), generator=generator).tolist()
        return Group(Prompt(str(number), "", drawn(12)), tuple(answer() for _ in rewards), tuple(map(float, rewards)))

    return make_batch([group(n) for n in range(PROMPTS)], pad_token=0)


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Of this process's threads: other processes on the machine do not count."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


def learn(learner: Learner, batch: Batch, step: int) -> None:
    """A step, with four recorded completions of least and four of most reward, as by default."""
    rising = batch.advantages.sum(-1).argsort(stable=True)
    learner.learn(batch, step, log=TokenLog(batch, torch.stack([rising[:4], rising[-4:]], 1).flatten().tolist()))


def measure(batch: Batch) -> None:
    """What every step measures."""
    clipped = batch.sampler_logprobs < -5
    rows = (batch.response_mask, batch.advantages)
    measure_mismatch(batch.sampler_logprobs * 0.99, batch.sampler_logprobs, *rows, batch.ended)
    clipped_sides(clip_reasons(batch.sampler_logprobs, clipped, clipped, rows[1], rows[0]))
    ages, index = Ages(batch, 1), torch.arange(len(batch.tokens))
    ages.begin(0, index)
    ages.add(index, batch.sampler_logprobs * 0.99, batch)
    ages.mismatch(Processes())


def main(options: dict[str, str]) -> None:
    """Measure and print."""
    learners = {every: learner_of(options, every) for every in (0, 1)}
    vocabulary = learners[0].model.config.vocab_size
    ratios, always = [], []
    for step in range(PAIRS + 2):
        batch = batch_of(step, vocabulary)
        order = (0, 1) if step % 2 else (1, 0)
        took = {every: seconds(learn, learners[every], batch, step) for every in order}
        if step >= 2:  # the first ones compile
            ratios.append(took[1] / took[0] - 1)
            always.append(seconds(measure, batch) / took[0])
    each, constant = statistics.median(ratios), statistics.median(always)
    print(f"a step that measures: {each:+.1%} of its learning; every tenth: {each / 10:+.2%}")
    print(f"measures of every step: {constant:.2%}; together {each / 10 + constant:.2%}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(dict(zip((name.removeprefix("--") for name in arguments[::2]), arguments[1::2], strict=True)))
