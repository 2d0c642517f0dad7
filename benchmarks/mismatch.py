"""`python -m benchmarks mismatch`: distance of learner and sampler, per scheme and compute dtype.

For each scheme and dtype one engine samples completions, and three learners score the same tokens:

- plain: the master cast to the compute dtype;
- fake-quant: the product with dequantized weights;
- aligned: the engine's kernels on the published codes, and the engine's rounding in norms, rotary
  embedding and attention.

The floor is the distance of an unquantized engine from an unquantized transformers model in the
same run and dtype.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qarl.configs.schema.rollout import RolloutConfig
from qarl.learner.batching import make_batch
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.learner.processes import Processes
from qarl.mismatch.investigate import (
    FLOOR,
    LEARNERS,
    LearnerKind,
    engine_of,
    learner_over,
    scored,
)
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.schemes import get_scheme
from qarl.report.tables import PlainTable
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.run.policy import model_folder

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class MismatchRow:
    """Mismatch of one learner on one scheme's completions."""

    dtype: str
    scheme: str
    learner: str
    mismatch: Mismatch
    over_floor: float
    """Mean |Δ log p| divided by that of the dtype's floor."""


def measure(
    model: str,
    schemes: Sequence[str],
    dtypes: Sequence[str],
    prompts: int = 32,
    tokens: int = 64,
    seed: int = 0,
) -> list[MismatchRow]:
    """Return all rows, the floor's rows first within each dtype.

    Args:
        model: folder, hub id or embedded name.
        schemes: schemes to measure; bf16 is always run, because it is the floor.
        dtypes: compute dtypes.
        prompts: number of completions, one for each prompt.
        tokens: length of each completion.
        seed: seed of the sampling.
    """
    quantized = [get_scheme(scheme).name for scheme in schemes if scheme != "bf16"]
    rows: list[MismatchRow] = []
    folder = model_folder(model)
    for dtype in dtypes:
        floor = math.nan
        for scheme in ("bf16", *quantized):
            learners = (
                LEARNERS if scheme != "bf16" else {"floor": FLOOR, "aligned": LEARNERS["aligned"]}
            )
            mismatches = _measure_scheme(folder, dtype, scheme, learners, prompts, tokens, seed)
            floor = mismatches["floor"].mean_abs if scheme == "bf16" else floor
            rows += [
                MismatchRow(
                    dtype=dtype,
                    scheme=scheme,
                    learner=k,
                    mismatch=m,
                    over_floor=m.mean_abs / floor,
                )
                for k, m in mismatches.items()
            ]
    return rows


def table(rows: list[MismatchRow]) -> PlainTable:
    """Return the table to print."""
    figures = (
        "mean |Δ log p|",
        "max |Δ log p|",
        "equal",
        "k3-KL",
        "sequence weight",
        "× floor",
    )
    title = "learner against sampler, nats"
    shown = PlainTable("dtype", "engine", "learner", *figures, figures=figures, title=title)
    for row in rows:
        m = row.mismatch
        weights = f"{math.exp(m.log_w_low):.4f} … {math.exp(m.log_w_high):.4f}"
        shown.add_row(
            row.dtype,
            row.scheme,
            row.learner,
            f"{m.mean_abs:.2e}",
            f"{m.max_abs:.2e}",
            f"{m.equal:.1%}",
            f"{m.k3:.1e}",
            weights,
            f"{row.over_floor:.2f}",
        )
    return shown


def _measure_scheme(
    folder: Path,
    dtype: str,
    scheme: str,
    learners: dict[str, LearnerKind],
    prompts: int,
    tokens: int,
    seed: int,
) -> dict[str, Mismatch]:
    masters = load_masters(folder, torch.float32, Processes().device)
    model = learner_over(masters, scheme, dtype, LEARNERS["fake-quant"])
    rollout = RolloutConfig(max_prompt_tokens=PROMPT_TOKENS, max_new_tokens=tokens)
    with engine_of(model, folder, rollout, dtype) as engine:
        drawn = _prompts(prompts, model.config.vocab_size, seed)
        completions = engine.generate(drawn, Sampling(1, tokens, seed=seed))
    pairs = zip(drawn, completions, strict=True)
    groups = [Group(prompt, tuple(answers), (0.0,)) for prompt, answers in pairs]
    batch = make_batch(groups, pad_token=0)
    return {
        name: measure_mismatch(
            scored(learner_over(masters, scheme, dtype, kind), batch),
            batch.sampler_logprobs,
            batch.response_mask,
        )
        for name, kind in learners.items()
    }


def _prompts(count: int, vocabulary: int, seed: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    # special tokens sit at the start of most vocabularies
    low = min(16, vocabulary // 2)
    drawn = torch.randint(low, vocabulary, (count, PROMPT_TOKENS), generator=generator)
    return [Prompt(str(i), "", tuple(row)) for i, row in enumerate(drawn.tolist())]
