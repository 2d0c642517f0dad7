"""`qarl bench mismatch`: how far learner and sampler are apart, per scheme and compute dtype.

One engine a scheme and dtype samples completions; three learners score the same tokens: plain (the master cast to
the compute dtype), fake-quant (dequantized product) and aligned (the engine's kernels on the published codes, the
engine's rounding in norms, rotary embedding and attention). The floor is an unquantized engine against an unquantized
transformers model, same run, same dtype.
"""

import dataclasses
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from qarl.advice.mismatch import FLOOR, LEARNERS, LearnerKind, engine_of, scored
from qarl.bench.random_policy import NAMES, random_policy
from qarl.configs.schema.run import RolloutConfig
from qarl.learner.batching import make_batch
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.learner.processes import Processes
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.report.tables import PlainTable
from qarl.rollout.engine import Engine
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.run.session import model_folder


@dataclass(frozen=True)
class MismatchOptions:
    """schemes, dtypes: what is compared ("bf16" is always run, as the floor). prompts × tokens completions of one
    sample each. peak: factor on the output head's weights, so that a random model's distributions are peaky."""

    folder: Path
    schemes: tuple[str, ...] = ("w4a16", "w8a8", "fp8")
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    prompts: int = 32
    tokens: int = 64
    prompt_tokens: int = 16
    peak: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class MismatchRow:
    """One learner on one scheme's completions. over_floor: mean |Δ log p| over that of the dtype's floor."""

    dtype: str
    scheme: str
    learner: str
    mismatch: Mismatch
    over_floor: float


def measure(options: MismatchOptions) -> list[MismatchRow]:
    """All rows, floor rows first within each dtype."""
    rows: list[MismatchRow] = []
    for dtype in options.dtypes:
        unquantized = _measure_scheme(options, dtype, "bf16", {"floor": FLOOR, "aligned": LEARNERS["aligned"]})
        floor = unquantized["floor"]
        rows += [
            MismatchRow(dtype=dtype, scheme="bf16", learner=k, mismatch=m, over_floor=m.mean_abs / floor.mean_abs)
            for k, m in unquantized.items()
        ]
        for scheme in options.schemes:
            mismatches = _measure_scheme(options, dtype, scheme, LEARNERS)
            rows += [
                MismatchRow(dtype=dtype, scheme=scheme, learner=k, mismatch=m, over_floor=m.mean_abs / floor.mean_abs)
                for k, m in mismatches.items()
            ]
    return rows


def run(
    model: str, schemes: tuple[str, ...], dtypes: tuple[str, ...], prompts: int, tokens: int, peak: float | None,
    seed: int,
) -> list[MismatchRow]:  # fmt: skip
    """As `measure`, from the command's words. model: also one of `random_policy.NAMES`, whose output head is multiplied
    by 12."""
    for scheme in schemes:
        get_scheme(scheme)
    peak = peak or (12.0 if model in NAMES else 1.0)
    quantized = tuple(s for s in schemes if s != "bf16")
    with random_policy(model, seed) if model in NAMES else nullcontext(model_folder(model)) as folder:
        return measure(
            MismatchOptions(
                folder=folder, schemes=quantized, dtypes=dtypes, prompts=prompts, tokens=tokens, peak=peak, seed=seed
            )
        )


def table(rows: list[MismatchRow]) -> PlainTable:
    """Rows for a person."""
    figures = ("mean |Δ log p|", "max |Δ log p|", "equal", "k3-KL", "sequence weight", "× floor")
    title = "learner against sampler, nats"
    shown = PlainTable("dtype", "engine", "learner", *figures, figures=figures, title=title)
    for row in rows:
        m = row.mismatch
        weights = f"{math.exp(m.log_w_low):.4f} … {math.exp(m.log_w_high):.4f}"
        shown.add_row(
            row.dtype, row.scheme, row.learner, f"{m.mean_abs:.2e}", f"{m.max_abs:.2e}", f"{m.equal:.1%}",
            f"{m.k3:.1e}", weights, f"{row.over_floor:.2f}",
        )  # fmt: skip
    return shown


def rows_as_data(rows: list[MismatchRow]) -> list[dict]:
    """Rows as JSON-ready dictionaries."""
    return [dataclasses.asdict(row) for row in rows]


def _measure_scheme(
    options: MismatchOptions, dtype: str, scheme: str, learners: dict[str, LearnerKind]
) -> dict[str, Mismatch]:
    model = _low_bit(options, dtype, scheme, LEARNERS["fake-quant"])
    rollout = RolloutConfig(max_prompt_tokens=options.prompt_tokens, max_new_tokens=options.tokens)
    with engine_of(model, options.folder, rollout, dtype) as engine:
        groups = _sample(engine, options, model.config.vocab_size)
    batch = make_batch(groups, pad_token=0)
    return {
        name: measure_mismatch(
            scored(_low_bit(options, dtype, scheme, kind), batch), batch.sampler_logprobs, batch.response_mask
        )
        for name, kind in learners.items()
    }


def _low_bit(options: MismatchOptions, dtype: str, scheme: str, kind: LearnerKind) -> LowBitModel:
    masters = load_masters(options.folder, torch.float32, Processes().device)
    if options.peak != 1.0:
        _untie(masters)
        with torch.no_grad():
            masters.get_parameter("lm_head.weight").mul_(options.peak)
    compute = COMPUTE_DTYPES[dtype]
    context = LayerContext(compute, kind.kernel, kind.aligned)
    return LowBitModel(masters, get_scheme(scheme), context, kind.operators)


def _untie(model) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False


def _sample(engine: Engine, options: MismatchOptions, vocabulary: int) -> list[Group]:
    generator = torch.Generator().manual_seed(options.seed)
    low = min(16, vocabulary // 2)  # special tokens sit at the start of most vocabularies
    drawn = torch.randint(low, vocabulary, (options.prompts, options.prompt_tokens), generator=generator)
    prompts = [Prompt(str(i), "", tuple(row)) for i, row in enumerate(drawn.tolist())]
    completions = engine.generate(prompts, Sampling(1, options.tokens, seed=options.seed))
    return [Group(p, tuple(c), (0.0,)) for p, c in zip(prompts, completions, strict=True)]
