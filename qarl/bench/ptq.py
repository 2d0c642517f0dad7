"""`qarl bench ptq`: train in bf16 and quantize afterwards, against QaRL, by what is deployed.

For each seed two runs that differ in nothing but the scheme, one of them unquantized. That one is quantized by every
method, and all deployable checkpoints answer the same held-out problems, greedily, in vLLM. Finished runs in the folder
are used again and broken-off ones continued, so the same command goes on where it stopped.
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.runs import existing_run, finished_run, overrides_in, refuse_chosen
from qarl.configs.errors import ConfigError
from qarl.configs.load import default_config, load_config
from qarl.configs.schema.run import EvalConfig, RunConfig
from qarl.ptq.export import check_request, quantize, verify
from qarl.ptq.methods import METHODS, methods_for
from qarl.ptq.source import open_source
from qarl.quant.schemes import get_scheme
from qarl.report.run_folder import RunFolder
from qarl.report.tables import PlainTable
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.run.evaluate import answered
from qarl.run.prompts import open_prompter
from qarl.run.session import check_input
from qarl.tasks import load_task

UNQUANTIZED = "bf16"
_CHOSEN_HERE = ("scheme", "seed", "output", "export")


@dataclass(frozen=True)
class PtqOptions:
    """runs: folder of the runs. methods: by name; none stands for all that are for `scheme`. calibration: sequences,
    None for the default number. overrides: of the configuration all runs share, by dotted path."""

    runs: Path
    seeds: tuple[int, ...]
    scheme: str
    methods: tuple[str, ...]
    calibration: int | None
    overrides: dict[str, str]


@dataclass(frozen=True)
class Deployed:
    """One checkpoint of one seed. accuracy: held-out greedy, in [0, 1]. moved: mean |Δ log p| from the unquantized
    policy it was quantized from, nats; None where that was not."""

    seed: int
    variant: str
    scheme: str
    accuracy: float
    moved: float | None = None


def measure(options: PtqOptions, console: Console) -> list[Deployed]:
    """Train what is not trained yet, then quantize and evaluate, seed by seed.

    Raises `ConfigError` or the error of the part that is wrong before anything is trained.
    """
    options = _checked(options)
    schemes = (UNQUANTIZED, options.scheme)
    runs = {
        (seed, scheme): finished_run(_config(options, seed, scheme), console)
        for seed in options.seeds
        for scheme in schemes
    }
    deployed = []
    for seed in options.seeds:
        console.print(f"quantizing and evaluating seed {seed}")
        bf16, low_bit = (runs[seed, scheme] for scheme in schemes)
        deployed.append(Deployed(seed, "unquantized", UNQUANTIZED, _export_accuracy(bf16)))
        deployed += _quantized(options, seed, bf16)
        deployed.append(Deployed(seed, "QaRL", options.scheme, _export_accuracy(low_bit)))
    return deployed


def table(deployed: list[Deployed]) -> PlainTable:
    """A row a variant: accuracy in percent of each seed, their mean, and the mean's distance to QaRL's in points."""
    seeds = list(dict.fromkeys(d.seed for d in deployed))
    variants: dict[str, list[Deployed]] = {}
    for one in deployed:
        variants.setdefault(one.variant, []).append(one)
    figures = (*(f"seed {seed}" for seed in seeds), "mean", "to QaRL", "|Δ log p| moved")
    title = "held-out accuracy of the deployable checkpoint"
    shown = PlainTable("variant", "scheme", *figures, figures=figures, title=title)
    for variant, of_seeds in variants.items():
        moved = [d.moved for d in of_seeds if d.moved is not None]
        mean = _mean([d.accuracy for d in of_seeds])
        points = 100 * (mean - _mean([d.accuracy for d in variants["QaRL"]]))
        shown.add_row(
            variant, of_seeds[0].scheme, *(f"{d.accuracy:.1%}" for d in of_seeds), f"{mean:.1%}",
            "" if variant == "QaRL" else f"{points:+.1f}", f"{_mean(moved):.1e}" if moved else "",
        )  # fmt: skip
    return shown


def as_data(deployed: list[Deployed]) -> list[dict[str, Any]]:
    """JSON-ready: one object a checkpoint."""
    return [dataclasses.asdict(one) for one in deployed]


def _config(options: PtqOptions, seed: int, scheme: str) -> RunConfig:
    """The configuration of one run, its place among the runs included."""
    file = default_config(options.overrides.get("model"))
    config = load_config(file, {**overrides_in(scheme, options.overrides), "seed": str(seed), "scheme": scheme})
    output = options.runs / f"{Path(config.model).name}-{scheme}-seed{seed}"
    return config.model_copy(update={"output": str(output), "export": True})


def _checked(options: PtqOptions) -> PtqOptions:
    """The options with their methods spelled out, once they, the model and the runs found on disk go together."""
    refuse_chosen(options.overrides, _CHOSEN_HERE)
    methods = options.methods or methods_for(get_scheme(options.scheme)) or ("rtn",)
    for seed in options.seeds:
        for scheme in (UNQUANTIZED, options.scheme):
            config = _config(options, seed, scheme)
            check_input(config)
            existing_run(config)
    config = _config(options, options.seeds[0], UNQUANTIZED)
    for method in methods:
        check_request(config, str(config.output), method, options.scheme, _asked(options, method))
    if not config.eval.problems:
        raise ConfigError("--eval.problems 0: held-out accuracies are what is compared; give at least 1")
    return dataclasses.replace(options, methods=methods)


def _asked(options: PtqOptions, method: str) -> int | None:
    known = METHODS.get(method)
    return options.calibration if known and known.calibrated else None


def _quantized(options: PtqOptions, seed: int, run: RunFolder) -> list[Deployed]:
    """The unquantized run's checkpoint by every method, each proven and evaluated in one fresh engine."""
    config, found = run.config(), []
    counts = [check_request(config, str(run.path), m, options.scheme, _asked(options, m)) for m in options.methods]
    with tempfile.TemporaryDirectory(prefix=".ptq-", dir=run.path) as work:
        source = open_source(run, Path(work), options.scheme, max(counts))
        for method in options.methods:
            folder = Path(work) / method
            quantize(source, method, folder)
            with open_engine(folder, config.rollout, config.dtype) as engine:
                moved, accuracy = verify(source, engine), _accuracy(engine, folder, config)
            found.append(Deployed(seed=seed, variant=method, scheme=options.scheme, accuracy=accuracy, moved=moved))
    return found


def _export_accuracy(run: RunFolder) -> float:
    config = run.config()
    with open_engine(run.export, config.rollout, config.dtype) as engine:
        return _accuracy(engine, run.export, config)


def _accuracy(engine: Engine, checkpoint: Path, config: RunConfig) -> float:
    prompter = open_prompter(checkpoint, config.rollout, config.task)
    task = load_task(config.task).shortened(prompter.fits)
    asking = EvalConfig(problems=config.eval.problems)
    return answered(engine, task, prompter, asking, config.rollout).accuracy


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
