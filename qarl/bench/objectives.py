"""`qarl bench objectives`: every objective on one task, with one budget, by what it deploys.

For each seed and objective one run; all runs share model, scheme, problems, completions a step, steps, optimizer and
learning rate. An objective keeps its own correction and aggregation, and its own options but for `settings`. Finished
runs are used again and broken-off ones continued, so the same command goes on where it stopped. Seeds are the outer
loop: with the first seed done there is one run of every objective.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.names import OBJECTIVES
from qarl.bench.runs import existing_run, finished_run, refuse_chosen
from qarl.configs.errors import ConfigError
from qarl.configs.load import default_config, load_config
from qarl.configs.schema.objectives import TbpoConfig
from qarl.configs.schema.run import RunConfig
from qarl.report.metrics import read_metrics
from qarl.report.run_folder import RunFolder
from qarl.report.tables import PlainTable
from qarl.run.session import check_input

_BY_SEQUENCE = ("gspo", "gspo_dual_clip")

LAST = 10
"""Steps at the end over which reward and error tokens are averaged."""


@dataclass(frozen=True)
class ObjectivesOptions:
    """runs: folder of the runs. objectives: by name; none stands for all. overrides: of the configuration all runs
    share, by dotted path."""

    runs: Path
    seeds: tuple[int, ...]
    objectives: tuple[str, ...]
    steps: int
    overrides: dict[str, str]


@dataclass(frozen=True)
class Trained:
    """One run. accuracy: held-out greedy, of the last step's policy, which the export holds bit for bit
    (`qarl.run.verify_export` proves it). reward, error_tokens: means over the last `LAST` steps. k3: of sampler against
    learner, nats a token. update: `learn/update_log_ratio`, how far the batch's updates had moved the policy when the
    last of them began (mean |mean_t log π_cur/π_old| of a sequence). k3, update and clipped are means over all steps
    that learned; nan where none did. rewards: of every step."""

    objective: str
    seed: int
    accuracy: float
    reward: float
    k3: float
    update: float
    clipped: float
    entropy: float
    error_tokens: float
    rewards: tuple[float, ...]


def measure(options: ObjectivesOptions, console: Console) -> list[Trained]:
    """Train what is not trained yet; one row a run.

    Raises `ConfigError` or the error of the part that is wrong before anything is trained.
    """
    options = _checked(options)
    return [
        _trained(finished_run(_config(options, seed, objective), console), objective, seed)
        for seed in options.seeds
        for objective in options.objectives
    ]


def table(trained: list[Trained]) -> PlainTable:
    """A row an objective: means over seeds, and the range of the accuracy. The columns are `Trained`'s."""
    seeds = len({t.seed for t in trained})
    title = f"objectives: means over {seeds} seed{'s' * (seeds > 1)}"
    figures = ("held-out", "min", "max", "reward", "k3", "update", "clipped", "error tokens")
    shown = PlainTable("objective", *figures, figures=figures, title=title)
    for objective in dict.fromkeys(t.objective for t in trained):
        runs = [t for t in trained if t.objective == objective]

        def mean(name: str, runs: list[Trained] = runs) -> float:
            return _mean([getattr(run, name) for run in runs])

        accuracies = [run.accuracy for run in runs]
        shown.add_row(
            objective, f"{mean('accuracy'):.1%}", f"{min(accuracies):.1%}", f"{max(accuracies):.1%}",
            f"{mean('reward'):.3f}", f"{mean('k3'):.1e}", f"{mean('update'):.1e}", f"{mean('clipped'):.2%}",
            f"{mean('error_tokens'):.2%}",
        )  # fmt: skip
    return shown


def as_data(trained: list[Trained]) -> list[dict[str, Any]]:
    """JSON-ready: one object a run."""
    return [dataclasses.asdict(one) for one in trained]


def settings(objective: str, file: Path) -> dict[str, str]:
    """What an objective is given besides its name, where its defaults are not taken. Published bounds on a sequence's
    ratio, 3e-4 to 7e-4, are for models of billions of parameters at a rate of 1e-6; so all of those are the bounds that
    the configuration file has for TBPO. Bounds on a token's ratio are the published ones. `on_policy` is defined by one
    update a batch: as many completions as the others, half as many updates."""
    if objective == "on_policy":
        return {"learner.mini_batches": "1"}
    band = load_config(file, {}).learner.objective
    if objective not in _BY_SEQUENCE or not isinstance(band, TbpoConfig):
        return {}
    bounds = {"clip_low": band.delta_low, "clip_high": band.epsilon_high}
    return {f"learner.objective.{name}": str(bound) for name, bound in bounds.items()}


def _config(options: ObjectivesOptions, seed: int, objective: str) -> RunConfig:
    """The configuration of one run, its place among the runs included."""
    file = default_config(options.overrides.get("model"))
    shared = {
        "steps": str(options.steps),
        "learner.optimizer.decay_steps": str(2 * options.steps // 3),  # the embedded default's proportion
        "eval.every": str(options.steps),
        **options.overrides,
    }
    own = {"seed": str(seed), "learner.objective.name": objective, **settings(objective, file)}
    config = load_config(file, {**shared, **own})
    output = options.runs / f"{Path(config.model).name}-{config.scheme}-{objective}-seed{seed}"
    return config.model_copy(update={"output": str(output), "export": True})


def _checked(options: ObjectivesOptions) -> ObjectivesOptions:
    """The options with their objectives spelled out, once they, the model and the runs found on disk go together."""
    refuse_chosen(options.overrides, ("learner.objective", "seed", "output", "export"))
    options = dataclasses.replace(options, objectives=options.objectives or OBJECTIVES)
    configs = [_config(options, seed, objective) for seed in options.seeds for objective in options.objectives]
    check_input(configs[0])
    for config in configs:
        existing_run(config)
    if not configs[0].eval.problems:
        raise ConfigError("--eval.problems 0: held-out accuracies are what is compared; give at least 1")
    return options


def _trained(run: RunFolder, objective: str, seed: int) -> Trained:
    steps = read_metrics(run.metrics)
    learned = [step for step in steps if "learn/loss" in step]

    def over(lines: list[dict[str, Any]], name: str) -> float:
        return _mean([line[name] for line in lines if line[name] is not None])

    return Trained(
        objective=objective,
        seed=seed,
        accuracy=steps[-1]["accuracy"],
        reward=over(steps[-LAST:], "reward"),
        k3=over(learned, "learn/mismatch/k3"),
        update=over(learned, "learn/update_log_ratio"),
        clipped=over(learned, "learn/clipped"),
        entropy=over(learned[-LAST:], "learn/entropy"),
        error_tokens=over(steps[-LAST:], "error_tokens"),
        rewards=tuple(step["reward"] for step in steps),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
