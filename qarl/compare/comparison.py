"""A comparison: variants of one configuration, each with every seed. Imports no torch, no vLLM."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.load import config_file, default_config, load_config
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import UNQUANTIZED


@dataclass(frozen=True)
class Figure:
    """One number per run, made of a metric of its steps."""

    metric: str
    """Metric (docs/reference/metrics.md), or "seconds" for those of a step without evaluation."""
    over: str
    """"first" or "last": mean over the first or last `number` steps that measured the metric;
    "mean": mean over all of them; "reaches": first step at which the metric is at least `number`.
    """
    number: float = math.nan

    _WRITTEN = re.compile(r"(\S+) (?:(mean)|(first|last) ([1-9]\d*)|(reaches) (\S+))")

    @classmethod
    def parse(cls, name: str, text: str) -> "Figure":
        """Parse "METRIC mean", "METRIC first N", "METRIC last N" or "METRIC reaches X".

        Raises `ConfigError` for any other text. name: the figure's name, for the message.
        """
        words = cls._WRITTEN.fullmatch(text)
        try:
            if words is not None:
                metric, mean, end, count, reaches, bound = words.groups()
                return cls(metric, mean or end or reaches, float(count or bound or "nan"))
        except ValueError:
            pass
        raise ConfigError(
            f"figures: {name}: {text!r} must be METRIC mean, METRIC first N, METRIC last N or"
            " METRIC reaches X, such as 'reward last 10'"
        )


@dataclass(frozen=True)
class Quantized:
    """Post-training quantization of another variant's runs."""

    of: str
    """Name of that variant."""
    method: str
    """Name of the method."""
    calibration: int | None
    """Number of calibration sequences. None: the method's default."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One variant of the configuration."""

    name: str
    options: Mapping[str, str]
    """Options that it sets, dotted path → text."""
    quantized: Quantized | None = None
    """Quantization after training; None if it is trained."""
    reference: str | None = None
    """Name of the variant it is compared with, if any."""
    baseline: str | None = None
    """Name of the variant whose gap to the reference it is to close, if any."""


@dataclass(frozen=True)
class Cell:
    """A variant with a seed: a run, or a quantized checkpoint of another variant's run."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.variant.name}-seed{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """Variants of one configuration, to be run with every seed."""

    output: Path
    """Folder of all runs."""
    config: str | None
    """Configuration file or shipped name; None for the default of `qarl train`."""
    options: Mapping[str, str]
    """Options of all runs, dotted path → text."""
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    evaluate: Mapping[str, str]
    """Options of `qarl eval`; empty to leave that evaluation out."""
    figures: Mapping[str, Figure]
    """Figures of each run, by name."""

    def cells(self) -> list[Cell]:
        """Return all cells in the order of their runs.

        Seeds are outermost, so the first seed gives one run of everything. Quantized checkpoints
        come after all that is trained.
        """
        cells = [Cell(variant, seed) for seed in self.seeds for variant in self.variants]
        return sorted(cells, key=lambda cell: cell.variant.quantized is not None)

    def source(self, cell: Cell) -> Cell:
        """Return the run that a quantized checkpoint is made of; for a trained cell, itself."""
        quantized = cell.variant.quantized
        if quantized is None:
            return cell
        source = next(variant for variant in self.variants if variant.name == quantized.of)
        return Cell(source, cell.seed)

    def folder(self, cell: Cell) -> Path:
        """Return the folder of the run, or of the quantized checkpoint."""
        return self.output / cell.name

    def run_config(self, cell: Cell) -> RunConfig:
        """Return the cell's configuration, with its folder as output.

        Options of `quantization` are left out of unquantized runs, which have none. Raises
        `ConfigError`.
        """
        options = {**self.options, **cell.variant.options}
        file = config_file(self.config) if self.config else default_config(options.get("model"))
        if (options.get("scheme") or load_config(file, {}).scheme) == UNQUANTIZED:
            options = {
                path: text for path, text in options.items() if not path.startswith("quantization.")
            }
        config = load_config(file, {**options, "seed": str(cell.seed)})
        return config.model_copy(update={"output": str(self.folder(cell)), "export": True})
