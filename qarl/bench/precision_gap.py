"""`qarl bench precision-gap`: how fast a trivial reward is learned, by what learner and sampler compute in.

The reward is minus the answer's length, the best policy ends at once (configs/immediate-eos.yaml). The ratio has the
sampler in its denominator, so its clip sees the gap between the two computations as well as the policy's movement: what
only the gap cuts is phantom clipping. Every pairing is one run a seed, found again by the same command.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.rounded_policy import rounded_policy
from qarl.bench.runs import existing_run, finished_run, refuse_chosen
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.run import RunConfig
from qarl.report.metrics import read_metrics
from qarl.report.run_folder import RunFolder
from qarl.report.tables import PlainTable
from qarl.run.session import check_input, model_folder

_UNALIGNED = {"scheme": "w4a16", "learner.aligned": "false"}
PAIRINGS: dict[str, dict[str, str]] = {
    "bf16": {"scheme": "bf16"},
    "bf16-transformers": {"scheme": "bf16", "learner.operators": "transformers"},
    "bf16-fp32": {"scheme": "bf16", "learner.aligned": "false", "learner.compute_dtype": "float32"},
    "bf16-masters": {"scheme": "bf16", "learner.master_dtype": "bfloat16"},
    "fp16": {"scheme": "bf16", "dtype": "float16"},
    "fp32": {"scheme": "bf16", "dtype": "float32"},
    "w4a16-aligned": {"scheme": "w4a16"},
    "w4a16-unaligned": _UNALIGNED,
    "w4a16-fp32": {**_UNALIGNED, "learner.compute_dtype": "float32"},
    "w4a16-shadow_forward": {**_UNALIGNED, "learner.ratio_fix": "shadow_forward"},
}
"""Unquantized: in bfloat16 with the engine's operators, with transformers' (what a trainer does that knows nothing of
the engine), in bfloat16 under a float32 learner (the pairing of TRL's study), with masters in bfloat16 too, and both in
float16 and in float32. Quantized sampler: with
QaRL's learner, a plain bfloat16 one, a plain float32 one, and the remedy of the bfloat16 one."""

FIRST = 5
"""Steps at the start over which clipping is averaged, before the policies have gone apart by learning."""

LAST = 20
"""Steps at the end over which the mismatch is averaged."""


@dataclass(frozen=True)
class GapOptions:
    """runs: folder of the runs. pairings: by name; none stands for all. threshold: of the mean reward, which is minus
    characters an answer. overrides: of the configuration all runs share, by dotted path. lrs: learning rates, as they
    were written; none stands for the configuration's. rounded: scheme at whose codes the policy's weights start; None:
    where they are."""

    runs: Path
    seeds: tuple[int, ...]
    pairings: tuple[str, ...]
    threshold: float
    overrides: dict[str, str]
    lrs: tuple[str, ...] = ()
    rounded: str | None = None


@dataclass(frozen=True)
class Gap:
    """One run. lr: learning rate. converged: the first step whose mean reward reached the threshold; None where none
    did. first_reward, last_reward: of the first and the last step. gap: mean |Δ log p| of learner and sampler at the
    first step, nats. phantom, clipped: shares of tokens over the first `FIRST` steps; phantom ones reach a bound with
    the sampler in the ratio and not with the learner before the batch. nan where no step of those learned.

    last_reward_mean, spread, correlation: over the last `LAST` steps, the reward, the deviation of log π_learner - log
    π_sampler (nats), and its correlation with the advantage. moved: last measured KL of the published policy from the
    start, nats a token. None where nothing of the kind was measured."""

    pairing: str
    lr: float
    seed: int
    converged: int | None
    first_reward: float
    last_reward: float
    gap: float
    phantom: float
    clipped: float
    rewards: tuple[float, ...]
    last_reward_mean: float
    spread: float | None
    correlation: float | None
    moved: float | None


def measure(options: GapOptions, console: Console) -> list[Gap]:
    """Train what is not trained yet; one row a run. Raises `ConfigError` before anything is trained."""
    options = _checked(options)
    if options.rounded is not None:
        source = model_folder(_config(options, 0, options.pairings[0]).model)
        model = rounded_policy(source, options.rounded, options.runs / f"{source.name}-{options.rounded}-codes")
        options = dataclasses.replace(options, overrides={**options.overrides, "model": str(model)})
    return [
        _gap(finished_run(_config(options, seed, pairing, lr), console), pairing, seed, options.threshold)
        for seed, pairing, lr in _cells(options)
    ]


def table(gaps: list[Gap], threshold: float) -> PlainTable:
    """A row a run; the columns are `Gap`'s."""
    title = f"steps until the mean reward is {threshold:g} or more"
    figures = (
        "lr", "seed", "steps", "first", "last", "|Δ log p|", "phantom", "clipped", "last std", "corr. A", "moved",
    )  # fmt: skip
    shown = PlainTable("pairing", *figures, figures=figures, title=title)
    for gap in gaps:
        shown.add_row(
            gap.pairing, f"{gap.lr:g}", str(gap.seed), "never" if gap.converged is None else str(gap.converged),
            f"{gap.first_reward:.2f}", f"{gap.last_reward:.2f}", f"{gap.gap:.1e}", f"{gap.phantom:.2%}",
            f"{gap.clipped:.2%}", *(_shown(value) for value in (gap.spread, gap.correlation, gap.moved)),
        )  # fmt: skip
    return shown


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def as_data(gaps: list[Gap]) -> list[dict[str, Any]]:
    """JSON-ready: one object a run."""
    return [dataclasses.asdict(gap) for gap in gaps]


def summarize(steps: list[dict[str, Any]], pairing: str, lr: float, seed: int, threshold: float) -> Gap:
    """One run's row from the lines of its metrics."""
    rewards = tuple(step["reward"] for step in steps)
    learned = [step for step in steps[:FIRST] if "learn/loss" in step]
    converged = next((step["step"] for step in steps if step["reward"] >= threshold), None)

    def mean(name: str) -> float:
        return sum(step[name] for step in learned) / len(learned) if learned else math.nan

    def last(name: str) -> float | None:
        values = [step[name] for step in steps[-LAST:] if step.get(name) is not None]
        return sum(values) / len(values) if values else None

    moved = [step["learn/kl_from_start"] for step in steps if step.get("learn/kl_from_start") is not None]
    gap = learned[0]["learn/mismatch/mean_abs"] if learned else math.nan
    phantom, clipped = mean("learn/phantom_clipped"), mean("learn/clipped")
    return Gap(
        pairing=pairing,
        lr=lr,
        seed=seed,
        converged=converged,
        first_reward=rewards[0],
        last_reward=rewards[-1],
        gap=gap,
        phantom=phantom,
        clipped=clipped,
        rewards=rewards,
        last_reward_mean=sum(rewards[-LAST:]) / len(rewards[-LAST:]),
        spread=last("learn/mismatch/std"),
        correlation=last("learn/mismatch/advantage_correlation"),
        moved=moved[-1] if moved else None,
    )


def _gap(run: RunFolder, pairing: str, seed: int, threshold: float) -> Gap:
    return summarize(read_metrics(run.metrics), pairing, run.config().learner.optimizer.lr, seed, threshold)


def _cells(options: GapOptions) -> list[tuple[int, str, str | None]]:
    """Seed, pairing and learning rate of every run, in their order."""
    return list(itertools.product(options.seeds, options.pairings, options.lrs or (None,)))


def _config(options: GapOptions, seed: int, pairing: str, lr: str | None = None) -> RunConfig:
    """The configuration of one run, its place among the runs included. lr: None for the configuration's own."""
    own = {"seed": str(seed), **PAIRINGS[pairing]} | ({} if lr is None else {"learner.optimizer.lr": lr})
    config = load_config(config_file("immediate-eos"), {**options.overrides, **own})
    rate = "" if lr is None else f"-lr{config.learner.optimizer.lr:g}"
    output = options.runs / f"{Path(config.model).name}-{pairing}{rate}-seed{seed}"
    return config.model_copy(update={"output": str(output), "export": True})


def _checked(options: GapOptions) -> GapOptions:
    chosen = {path for pairing in PAIRINGS.values() for path in pairing}
    chosen |= {"learner.optimizer.lr"} if options.lrs else set()
    refuse_chosen(options.overrides, (*sorted(chosen), "seed", "output", "export"))
    options = dataclasses.replace(options, pairings=options.pairings or tuple(PAIRINGS))
    configs = [_config(options, *cell) for cell in _cells(options)]
    for config in configs:
        check_input(config)
        existing_run(config)
    return options
