"""`python -m benchmarks precision`: updates that survive in masters of each precision.

At a small learning rate low-precision masters lose part of their updates. One random policy of the
embedded size is trained in every precision on the same batches. Its weights are rounded to numbers
that float32, bfloat16 and float16 all represent, so every trajectory starts from the same masters,
and any later difference comes from the steps. The reference is the trajectory of float32 masters.
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
"""Pairs of master_dtype and rounding; the first is the reference."""


@dataclass(frozen=True)
class PrecisionOptions:
    """Options of `python -m benchmarks precision`."""

    scheme: str = "w4a16"
    """Scheme of the policy."""
    dtype: str = "bfloat16"
    """Compute dtype of the policy."""
    steps: int = 14
    """Number of steps, each of two updates."""
    lr: float = 1e-6
    optimizer: str = "muon"
    kernel: str = "auto"
    seed: int = 0
    """Seed of weights and batches."""


@dataclass(frozen=True)
class PrecisionRow:
    """Figures of one precision of masters after all steps.

    W are its masters at the end, W₃₂ the reference's, and W₀ those at the start.
    """

    master_dtype: str
    rounding: str
    lost_updates: float
    """Fraction of the weights that an update was meant to move whose master did not move.

    It is the mean over the measured steps.
    """
    arrived: float
    """Component of the reference's movement that is in this one's.

    It is ⟨W - W₀, W₃₂ - W₀⟩ / ‖W₃₂ - W₀‖².
    """
    drift_mean: float
    """Mean of |W - W₃₂| divided by the mean of |W₃₂ - W₀|."""
    drift_max: float
    """Maximum of |W - W₃₂| divided by the maximum of |W₃₂ - W₀|."""
    flipped_codes: float | None
    """Fraction of low-bit codes that differ from the start; None if the scheme has no codes."""
    measuring: float
    """Seconds that measuring adds to a step, divided by those of a step that is not measured."""


def measure(
    options: PrecisionOptions, masters: tuple[tuple[str, str], ...] = MASTERS
) -> list[PrecisionRow]:
    """Return a row for each of `masters`, of which the first is the reference.

    Invalid options raise before anything is measured.
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
    """Return a table with one row per precision; columns follow the fields of `PrecisionRow`."""
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
    """Return the rows as JSON-ready dictionaries."""
    return [dataclasses.asdict(row) for row in rows]


def _check(options: PrecisionOptions) -> None:
    # raises if lr is no valid learning rate
    load_config(None, {"learner.optimizer.lr": str(options.lr)})
    require_support(get_scheme(options.scheme), COMPUTE_DTYPES[options.dtype])


def _start(folder: Path) -> dict[str, torch.Tensor]:
    """Return the masters at the start, fp32, rounded to values of both bfloat16 and float16."""
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
    """Step over all batches, and measure every second step.

    Returns the mean fraction of lost updates, and the relative time that measuring adds to a step.
    The latter compares medians, because other processes use the machine too.
    """
    learner.stopwatch = SynchronizedStopwatch()
    lost = []
    phases = ([], [])
    totals = []
    # numbered from 1, so that the first batch, which has extra work, is not measured
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
    """Return arrived, drift_mean and drift_max of `PrecisionRow`, over all masters.

    start: the masters at the start.
    """
    now = _values(learner)
    exact = _values(reference)
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
