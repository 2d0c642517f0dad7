"""`python -m benchmarks precision`: what each precision of masters keeps of updates at a small
learning rate.

One random policy of the embedded size, the same batches for everyone. Its weights are rounded to
numbers that float32, bfloat16 and float16 all hold, so every trajectory starts from the same
masters, and whatever apart they are later is their steps' doing. The reference is the trajectory of
float32 masters.
"""

import contextlib
import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner.batch import draw_sequences
from benchmarks.learner.worker import groups_of
from benchmarks.models import MODELS, PAD, write_model
from qarl.bench.stopwatch import SynchronizedStopwatch
from qarl.configs.load import load_config
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.learner import Learner
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.kernels.supported import require_support
from qarl.quant.layers.context import LayerContext
from qarl.quant.materialize.code_changes import FlipCount
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, MASTER_DTYPES, get_scheme
from qarl.report.tables import PlainTable

MASTERS = (
    ("float32", "nearest"),
    ("bfloat16", "nearest"),
    ("bfloat16", "stochastic"),
    ("float16", "nearest"),
    ("float16", "stochastic"),
)
"""master_dtype and rounding; the first is the reference."""


@dataclass(frozen=True)
class PrecisionOptions:
    """scheme, dtype: of the policy. steps: of two updates each. lr, optimizer, kernel, seed: of
    weights and batches.
    """

    scheme: str = "w4a16"
    dtype: str = "bfloat16"
    steps: int = 14
    lr: float = 1e-6
    optimizer: str = "muon"
    kernel: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class PrecisionRow:
    """One precision of masters, after all steps.

    lost_updates: share of the weights meant to move whose master did not, mean over the measured
    steps. arrived: of the reference's movement W₃₂ - W₀, the component that is in this one's, ⟨W -
    W₀, W₃₂ - W₀⟩/‖W₃₂ - W₀‖². drift_mean, drift_max: mean and maximum |W - W₃₂| over those of |W₃₂
    - W₀|. flipped_codes: share of low-bit codes that are not what they were at the start; None
    without any. measuring: seconds that measuring a step adds, over those of a step without.
    """

    master_dtype: str
    rounding: str
    lost_updates: float
    arrived: float
    drift_mean: float
    drift_max: float
    flipped_codes: float | None
    measuring: float


def measure(
    options: PrecisionOptions, masters: tuple[tuple[str, str], ...] = MASTERS
) -> list[PrecisionRow]:
    """A row for each of `masters`, of which the first is the reference. Raises before anything is
    measured.
    """
    _check(options)
    sizes = MODELS["tiny"]
    rows = []
    batches = [
        make_batch(groups_of(draw_sequences(sizes, options.seed + i)), PAD)
        for i in range(options.steps)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        write_model(sizes, Path(temporary), options.seed)
        start = _start(Path(temporary))
        reference = None
        for dtype, rounding in masters:
            learner = _learner(Path(temporary), options, dtype, rounding)
            flips = FlipCount()
            with contextlib.ExitStack() as layers:
                for layer in (
                    *learner.model.linears.values(),
                    *learner.model.experts.values(),
                ):
                    layers.enter_context(flips.over(layer.low_bit))
                lost, measuring = _learn(learner, batches)
            reference = reference or learner
            arrived, mean, largest = _distances(learner, reference, start)
            rows.append(
                PrecisionRow(
                    master_dtype=dtype,
                    rounding=rounding,
                    lost_updates=lost,
                    arrived=arrived,
                    drift_mean=mean,
                    drift_max=largest,
                    flipped_codes=flips.share,
                    measuring=measuring,
                )
            )
    return rows


def table(rows: list[PrecisionRow], options: PrecisionOptions) -> PlainTable:
    """A row a precision; the columns are `PrecisionRow`'s, in its order."""
    title = (
        f"masters after {options.steps} steps of {options.optimizer} at {options.lr:g}, against"
        f" {rows[0].master_dtype}"
    )
    figures = ("lost", "arrived", "drift", "max", "codes", "measuring")
    shown = PlainTable("masters", *figures, figures=figures, title=title)
    for row in rows:
        codes = "-" if row.flipped_codes is None else f"{row.flipped_codes:.3%}"
        shown.add_row(
            f"{row.master_dtype} {row.rounding}",
            f"{row.lost_updates:.2%}",
            f"{row.arrived:.1%}",
            f"{row.drift_mean:.2f}",
            f"{row.drift_max:.2f}",
            codes,
            f"{row.measuring:+.1%}",
        )
    return shown


def as_data(rows: list[PrecisionRow]) -> list[dict[str, Any]]:
    """JSON-ready: one object a row."""
    return [dataclasses.asdict(row) for row in rows]


def _check(options: PrecisionOptions) -> None:
    # refuses what is no learning rate
    load_config(None, {"learner.optimizer.lr": str(options.lr)})
    require_support(get_scheme(options.scheme), COMPUTE_DTYPES[options.dtype])


def _start(folder: Path) -> dict[str, torch.Tensor]:
    """The first masters, fp32: bfloat16 numbers that are float16 ones as well."""
    loaded = load_masters(folder, torch.float32).named_parameters()
    return {
        name: p.detach().to(torch.bfloat16).to(torch.float16).to(torch.float32)
        for name, p in loaded
    }


def _learner(folder: Path, options: PrecisionOptions, dtype: str, rounding: str) -> Learner:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = COMPUTE_DTYPES[options.dtype]
    loaded = load_masters(folder, MASTER_DTYPES[dtype], device)
    with torch.no_grad():
        for name, values in _start(folder).items():
            loaded.get_parameter(name).copy_(values)
    context = LayerContext(compute, options.kernel)
    model = LowBitModel(loaded, get_scheme(options.scheme), context)
    optimizer = {
        "name": options.optimizer,
        "lr": options.lr,
        "weight_decay": 0.0,
        "rounding": rounding,
    }
    config = {
        "objective": {"name": "grpo"},
        "mini_batches": 2,
        "master_dtype": dtype,
        "optimizer": optimizer,
        "diagnostics_every": 2,
    }
    return Learner(model, LearnerConfig.model_validate(config))


def _learn(learner: Learner, batches: list[Batch]) -> tuple[float, float]:
    """Step over all batches, measuring every second one. Returns the mean share of lost updates,
    and what measuring adds to a step: of medians, since the machine has other work.
    """
    learner.stopwatch = SynchronizedStopwatch()
    lost = []
    phases = ([], [])
    totals = []
    # the first has more to do, and is not measured
    for number, batch in enumerate(batches, start=1):
        stats = learner.learn(batch, number)
        measured = stats.records["lost_updates"] is not None
        phases[measured].append(stats.seconds["optimizer"] + stats.seconds["materialize"])
        if measured:
            lost.append(stats.records["lost_updates"])
        else:
            totals.append(sum(stats.seconds.values()))
    added = statistics.median(phases[1]) - statistics.median(phases[0])
    return statistics.mean(lost), added / statistics.median(totals)


def _distances(
    learner: Learner, reference: Learner, start: dict[str, torch.Tensor]
) -> tuple[float, float, float]:
    """arrived, drift_mean and drift_max of `PrecisionRow`, over all masters. start: their first
    values.
    """
    now, exact = (_values(one) for one in (learner, reference))
    device = next(iter(now.values())).device
    moved = torch.cat(
        [(exact[name] - values.to(device)).flatten() for name, values in start.items()]
    ).double()
    away = torch.cat([(now[name] - exact[name]).flatten() for name in start]).double()
    arrived = 1.0 + float(away @ moved / (moved @ moved))
    return (
        arrived,
        float(away.abs().mean() / moved.abs().mean()),
        float(away.abs().max() / moved.abs().max()),
    )


def _values(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: master.detach().float().clone() for name, master in learner.model.masters.items()}
