"""What is compared: variants of one configuration times seeds. Imports neither torch nor vLLM."""

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
    """One number a run, from a metric of its steps (docs/reference/metrics.md; "seconds": a step's,
    no evaluation).

    over: "first" or "last", the mean over so many steps that measured it; "mean", over all of them;
    "reaches", the first step at which it is at least `number`.
    """

    metric: str
    over: str
    number: float = math.nan

    _WRITTEN = re.compile(r"(\S+) (?:(mean)|(first|last) ([1-9]\d*)|(reaches) (\S+))")

    @classmethod
    def parse(cls, name: str, text: str) -> "Figure":
        """Of "METRIC mean", "METRIC first N", "METRIC last N" or "METRIC reaches X"."""
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
    """Post-training quantization of the runs of another variant, `of`. calibration: sequences;
    None: the default.
    """

    of: str
    method: str
    calibration: int | None


@dataclass(frozen=True, eq=False)
class Variant:
    """options: what it sets, dotted path → text. quantized: None where it is trained. reference,
    baseline: names of the variants it is compared with; None without one.
    """

    name: str
    options: Mapping[str, str]
    quantized: Quantized | None = None
    reference: str | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class Cell:
    """A variant with a seed: a run of its own, or a quantized checkpoint of another's."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.variant.name}-seed{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """output: folder of all runs. config: file or shipped name, None for `qarl train`'s. options:
    of all runs, dotted path → text. evaluate: options of `qarl eval`, none to leave that out.
    """

    output: Path
    config: str | None
    options: Mapping[str, str]
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    evaluate: Mapping[str, str]
    figures: Mapping[str, Figure]

    def cells(self) -> list[Cell]:
        """Seeds outermost: the first gives one run of everything; quantized checkpoints after what
        is trained.
        """
        cells = [Cell(variant, seed) for seed in self.seeds for variant in self.variants]
        return sorted(cells, key=lambda cell: cell.variant.quantized is not None)

    def source(self, cell: Cell) -> Cell:
        """The run that a quantized checkpoint comes from; of one that is trained, itself."""
        quantized = cell.variant.quantized
        if quantized is None:
            return cell
        return Cell(
            next(variant for variant in self.variants if variant.name == quantized.of),
            cell.seed,
        )

    def folder(self, cell: Cell) -> Path:
        """The run's; of a quantized checkpoint, the checkpoint's."""
        return self.output / cell.name

    def run_config(self, cell: Cell) -> RunConfig:
        """The cell's configuration, its folder included. Options of `quantization` pass unquantized
        runs by, which have none. Raises `ConfigError`.
        """
        options = {**self.options, **cell.variant.options}
        file = config_file(self.config) if self.config else default_config(options.get("model"))
        if (options.get("scheme") or load_config(file, {}).scheme) == UNQUANTIZED:
            options = {
                path: text for path, text in options.items() if not path.startswith("quantization.")
            }
        config = load_config(file, {**options, "seed": str(cell.seed)})
        return config.model_copy(update={"output": str(self.folder(cell)), "export": True})
