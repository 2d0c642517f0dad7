"""The grid: schemes × learners × objectives × seeds, and post-training quantization of the unquantized runs."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qarl.bench.names import LEARNERS
from qarl.bench.objectives import settings
from qarl.bench.record import device_name
from qarl.bench.runs import existing_run, overrides_in, refuse_chosen
from qarl.configs.errors import ConfigError, QarlError, SchemeError
from qarl.configs.load import default_config, load_config
from qarl.configs.schema.run import RunConfig
from qarl.ptq.export import check_request
from qarl.ptq.methods import METHODS, methods_for
from qarl.quant.schemes import get_scheme
from qarl.report.run_folder import describe_environment
from qarl.run.session import check_input

UNQUANTIZED = "bf16"
_CHOSEN_HERE = ("scheme", "seed", "output", "export", "learner.aligned", "learner.objective")
_COMPUTES = ("configs", "quant", "rollout", "learner", "sync", "qarl/run", "qarl/tasks", "qarl/embedded", "qarl/ptq")
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Cell:
    """One checkpoint to deploy. learner: one of `LEARNERS`, or a method of post-training quantization, of the
    unquantized run with that objective and seed. objective: its name, or NAME+CORRECTION."""

    scheme: str
    learner: str
    objective: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and its record."""
        return f"{self.scheme}-{self.learner}-{self.objective}-seed{self.seed}"

    @property
    def trained(self) -> "Cell":
        """The run it comes from: itself, but for post-training quantization."""
        if self.learner in LEARNERS:
            return self
        return dataclasses.replace(self, scheme=UNQUANTIZED, learner="unquantized")


@dataclass(frozen=True)
class Grid:
    """What to compare. methods: of post-training quantization, none to leave it out. samples: completions a problem at
    `temperature` for avg@samples, 0 to leave it out. skip_unsupported: leave out schemes the machine cannot run instead
    of refusing them. overrides: of the configuration all runs share, by dotted path."""

    runs: Path
    schemes: tuple[str, ...]
    learners: tuple[str, ...]
    objectives: tuple[str, ...]
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    samples: int
    temperature: float
    skip_unsupported: bool
    overrides: dict[str, str]

    def cells(self) -> list[Cell]:
        """Seeds outermost, so that with the first seed done there is one run of everything; quantized afterwards comes
        after what is trained."""
        trained, quantized = [], []
        for seed in self.seeds:
            for objective in self.objectives:
                if "unquantized" in self.learners:
                    trained.append(Cell(UNQUANTIZED, "unquantized", objective, seed))
                for scheme in self.schemes:
                    both = [learner for learner in self.learners if learner != "unquantized"]
                    trained += [Cell(scheme, learner, objective, seed) for learner in both]
                    methods = [method for method in self.methods if method in methods_for(get_scheme(scheme))]
                    quantized += [Cell(scheme, method, objective, seed) for method in methods]
        return trained + quantized

    def config(self, cell: Cell) -> RunConfig:
        """Of the run a cell comes from, its place among the runs included."""
        run = cell.trained
        objective, _, weight = run.objective.partition("+")
        file = default_config(self.overrides.get("model"))
        chosen = {"scheme": run.scheme, "seed": str(run.seed), "learner.objective.name": objective}
        if weight:
            chosen["learner.correction.name"] = weight
        if run.learner == "plain":
            chosen["learner.aligned"] = "false"
        shared = overrides_in(run.scheme, self.overrides)
        try:
            config = load_config(file, {**shared, **chosen, **settings(objective, file)})
        except ConfigError as error:
            raise ConfigError(f"{cell.name}: {error}; options hold for all runs of the grid") from error
        return config.model_copy(update={"output": str(self.runs / run.name), "export": True})

    def record(self, cell: Cell) -> Path:
        """Where a cell's figures are kept."""
        return self.runs / f"{cell.name}.json"


def checked(grid: Grid, unsupported: dict[str, str]) -> Grid:
    """The grid without schemes that are left out. unsupported: scheme → why this machine cannot run it.

    Raises `ConfigError` or the error of the part that is wrong, before anything is trained.
    """
    refuse_chosen(grid.overrides, _CHOSEN_HERE)
    for scheme in grid.schemes:
        get_scheme(scheme)
        if scheme == UNQUANTIZED:
            raise SchemeError("--schemes bf16: the unquantized run is --learners unquantized; name low-bit schemes")
    named, correction = [o for o in grid.objectives if "+" in o], grid.overrides.get("learner.correction.name")
    if named and correction is not None:
        raise ConfigError(
            f"--learner.correction.name {correction} and --objectives {named[0]} both choose a correction; name it in "
            "--objectives alone, NAME+CORRECTION, or give the option alone for all of them"
        )
    if grid.methods and "unquantized" not in grid.learners:
        raise ConfigError(
            f"--ptq {','.join(grid.methods)} quantizes the unquantized runs; add unquantized to --learners"
        )
    missing = {scheme: unsupported[scheme] for scheme in grid.schemes if scheme in unsupported}
    if missing and not grid.skip_unsupported:
        reasons = "; ".join(f"{scheme}: {reason}" for scheme, reason in missing.items())
        raise SchemeError(f"this machine cannot run {reasons}. Leave them out, or give --skip-unsupported")
    kept = tuple(scheme for scheme in grid.schemes if scheme not in missing)
    grid = dataclasses.replace(grid, schemes=kept)
    cells = grid.cells()
    if not cells:
        raise ConfigError("nothing is left to run; --learners and --schemes name what is compared")
    for cell in cells:
        config = grid.config(cell)
        if not config.eval.problems:
            raise ConfigError("--eval.problems 0: held-out accuracies are what is compared; give at least 1")
        if cell.learner in METHODS:
            check_request(config, str(config.output), cell.learner, cell.scheme, None)
        existing_run(config)
        refuse_mixed(grid.record(cell))
        if cell == cell.trained and cell.seed == grid.seeds[0]:  # what a run itself refuses does not go by its seed
            _check_run(cell, config)
    return grid


def _check_run(cell: Cell, config: RunConfig) -> None:
    try:
        check_input(config)
    except QarlError as error:
        raise type(error)(f"{cell.name}: {error}") from error


def refuse_mixed(record: Path) -> None:
    """Raise `ConfigError` for a record that another version of the code, or another machine, began."""
    if not record.is_file():
        return
    theirs, ours = json.loads(record.read_text())["stamp"], stamp()
    differing = [key for key in ours if theirs.get(key) != ours[key]]
    if differing:
        told = "; ".join(f"{key} {theirs.get(key)!r}, here {ours[key]!r}" for key in differing)
        raise ConfigError(
            f"{str(record)!r} was measured elsewhere ({told}): not to be mixed; choose another --runs, or remove it"
        )


@cache
def stamp() -> dict[str, Any]:
    """What figures depend on besides the configuration: the sources that compute, the machine, and versions."""
    sources = hashlib.sha256((_ROOT / "qarl/train.py").read_bytes())
    for folder in _COMPUTES:
        for file in sorted((_ROOT / folder).rglob("*.py")):
            sources.update(str(file.relative_to(_ROOT)).encode() + file.read_bytes())
    versions = {key: value for key, value in describe_environment().items() if key not in ("device", "threads", "qarl")}
    return {"code": sources.hexdigest()[:16], "device": device_name(), **versions}
