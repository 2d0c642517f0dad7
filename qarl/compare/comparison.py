"""What is compared: variants of one configuration times seeds. Imports neither torch nor vLLM."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from qarl.configs.complaints import complaints
from qarl.configs.errors import ConfigError
from qarl.configs.flags import FLAGS
from qarl.configs.load import config_file, default_config, field_paths, load_config, overridden
from qarl.configs.schema.base import LARGEST_SEED, Section, Text
from qarl.configs.schema.run import RunConfig
from qarl.configs.words import did_you_mean, quoted
from qarl.configs.yaml_file import read_yaml
from qarl.evaluation.suites import SUITES

UNQUANTIZED = "bf16"
EVALUATION = ("suite", "data", "problems", "samples", "temperature", "top_p", "top_k")
"""Options of `qarl eval` that a comparison may give."""

DEFAULT_FIGURES = {
    "reward": "reward last 10",
    "entropy": "learn/entropy last 10",
    "|Δ log p|": "learn/mismatch/mean_abs last 10",
    "|log w|": "learn/mismatch/mean_abs_log_w last 10",
    "error tokens": "error_tokens last 10",
    "clipped": "learn/clipped last 10",
    "s/step": "seconds mean",
}
_QUANTIZED = ("ptq", "of", "calibration", "scheme")
"""Keys of a variant that is quantized after training."""

_REMEDIES = {
    "seed": "every variant is run with every seed of --seeds, or of `seeds` in the file",
    "output": "--output names the folder of all runs, and each has a folder of its own in it",
    "export": "every run is exported, since exports are what is compared",
}
"""Options that a comparison sets itself → what to do instead."""


@dataclass(frozen=True)
class Figure:
    """One number a run, from a metric of its steps (docs/metrics.md; "seconds" is a step's, without evaluation).

    over: "first" or "last", the mean over so many steps that measured it; "mean", over all of them; "reaches", the
    first step at which it is at least `number`.
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
            f"figures: {name}: {text!r} must be METRIC mean, METRIC first N, METRIC last N or METRIC reaches X, such "
            "as 'reward last 10'"
        )


@dataclass(frozen=True)
class Quantized:
    """Post-training quantization by `method` of another variant's runs. calibration: sequences; None is the default."""

    of: "Variant"
    method: str
    calibration: int | None


@dataclass(frozen=True, eq=False)
class Variant:
    """options: what it sets, dotted path → text. quantized: None where it is trained. reference, baseline: names of the
    variants it is compared with; None without one."""

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
    """output: folder of all runs. config: file or shipped name, None for `qarl train`'s. options: of all runs, dotted
    path → text. evaluate: options of `qarl eval`, none to leave that out."""

    output: Path
    config: str | None
    options: Mapping[str, str]
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    evaluate: Mapping[str, str]
    figures: Mapping[str, Figure]

    def cells(self) -> list[Cell]:
        """Seeds outermost, so that with the first seed done there is one run of everything; quantized checkpoints come
        after what is trained."""
        cells = [Cell(variant, seed) for seed in self.seeds for variant in self.variants]
        return sorted(cells, key=lambda cell: cell.variant.quantized is not None)

    def folder(self, cell: Cell) -> Path:
        """The run's; of a quantized checkpoint, the checkpoint's."""
        return self.output / cell.name

    def run_config(self, cell: Cell) -> RunConfig:
        """The cell's configuration, its folder included. Options of `quantization` pass unquantized runs by, which have
        none. Raises `ConfigError`, naming the cell."""
        options = {**self.options, **cell.variant.options}
        file = config_file(self.config) if self.config else default_config(options.get("model"))
        try:
            if (options.get("scheme") or load_config(file, {}).scheme) == UNQUANTIZED:
                options = {path: text for path, text in options.items() if not path.startswith("quantization.")}
            config = load_config(file, {**options, "seed": str(cell.seed)})
        except ConfigError as error:
            raise ConfigError(f"{cell.name}: {error}") from error
        return config.model_copy(update={"output": str(self.folder(cell)), "export": True})


def _bodies(variants: Any) -> dict[str, Any]:
    if not isinstance(variants, dict) or not variants:
        raise ValueError(f"{quoted(variants)} must be named options, such as {{plain: {{aligned: false}}}}")
    bodies = {str(name): {} if body is None else body for name, body in variants.items()}
    for name, body in bodies.items():
        if not isinstance(body, dict):
            raise ValueError(f"{name} {quoted(body)} must be options, such as {{aligned: false}}")
    return bodies


class ComparisonFile(Section):
    """A comparison as its YAML file has it."""

    config: Text | None = Field(default=None, description="configuration of all runs: a YAML file or a shipped name")
    options: dict[str, Any] = Field(default={}, description="of `qarl train`, for all runs")
    seeds: tuple[Annotated[int, Field(ge=0, le=LARGEST_SEED)], ...] = Field(default=(0, 1, 2), description="of runs")
    variants: Annotated[dict[str, dict[str, Any]], BeforeValidator(_bodies)] = Field(
        description="name → options of `qarl train`, or of a quantized run"
    )
    vary: dict[str, list[Any]] = Field(default={}, description="option → values; variants that do not set it have each")
    reference: Text | None = Field(default=None, description="variant that others are compared with, or the first")
    baseline: Text | None = Field(default=None, description="variant whose gap to the reference is to be closed")
    evaluate: dict[str, Any] = Field(default={}, description="options of `qarl eval`, asked besides the run's own")
    figures: dict[str, str] = Field(default=DEFAULT_FIGURES, description="column → METRIC mean, first N, last N, …")


def shipped_comparisons() -> list[str]:
    """Names of the shipped files."""
    names = [file.name for file in (files("qarl.configs") / "compare").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_comparison(name: str) -> ComparisonFile:
    """A YAML file by path, or a shipped one by name. Raises `ConfigError` where there is neither, or for what is wrong
    in it."""
    path = Path(name)
    if not path.is_file():
        if name not in shipped_comparisons():
            raise ConfigError(
                f"no comparison file {name!r}, and no shipped one of that name ({', '.join(shipped_comparisons())})"
                f"{did_you_mean(name, shipped_comparisons())}"
            )
        path = Path(str(files("qarl.configs") / "compare" / f"{name}.yaml"))
    tree = read_yaml(path)
    try:
        return ComparisonFile.model_validate(tree)
    except ValidationError as error:
        paths = {problem["loc"]: ".".join(map(str, problem["loc"])) for problem in error.errors()}
        text = complaints(error, tree, ComparisonFile.model_fields, paths)
        raise ConfigError(f"comparison {name}: {text}") from error


def varied(vary: Mapping[str, Sequence[str]]) -> ComparisonFile:
    """A comparison without a file: a variant for each value of the first option, which the others vary."""
    (path, values), *others = vary.items()
    variants = {_word(path, text): {path: text} for text in values}
    return ComparisonFile(variants=variants, vary={name: list(of) for name, of in others})


def make_comparison(
    file: ComparisonFile,
    output: Path,
    options: Mapping[str, str],
    vary: Mapping[str, Sequence[str]] | None = None,
    variants: Sequence[str] = (),
    seeds: Sequence[int] = (),
    config: str | None = None,
) -> Comparison:
    """What a file and a command's options come to. options: dotted path → text, before the file's and after none but a
    variant's own. variants: names of those that are wanted; none stands for all. Raises `ConfigError`."""
    chosen = _chosen(file, variants)
    own = {name: option_texts(body) for name, body in file.variants.items() if name in chosen}
    vary = {**{path: [as_text(v) for v in values] for path, values in _by_path(file.vary).items()}, **(vary or {})}
    shared = option_texts(file.options) | dict(options)
    for path in (*shared, *vary, *itertools.chain(*own.values())):
        if path in _REMEDIES:
            raise ConfigError(f"{path} is chosen by the comparison: {_REMEDIES[path]}")
    for path, text in {**options, **{path: ",".join(values) for path, values in vary.items()}}.items():
        if all(path in body for body in own.values()):
            raise ConfigError(f"--{path} {text}: every variant sets {path} itself ({', '.join(own)}); leave it out")
    comparison = Comparison(
        output=output,
        config=config or file.config,
        options=shared,
        seeds=tuple(dict.fromkeys(seeds or file.seeds)),
        variants=tuple(_expanded(own, vary, file.reference or chosen[0], file.baseline)),
        evaluate=_evaluation(file.evaluate),
        figures={name: Figure.parse(name, text) for name, text in file.figures.items()},
    )
    if not comparison.seeds:
        raise ConfigError("seeds [] must hold at least one, such as [0, 1, 2]")
    return comparison


def option_texts(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options of a mapping, by dotted path, as a command line has them. Keys: short flags, dotted paths, or sections
    with keys of their own."""
    fields, texts = field_paths(), {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        inner = isinstance(value, dict) and path not in fields
        for name, text in (
            option_texts(value, f"{path}.") if inner else {FLAGS.get(path, path): as_text(value)}
        ).items():
            if name in texts:
                raise ConfigError(f"option {name} is given twice, with {texts[name]!r} and {text!r}; give it once")
            texts[name] = text
    return texts


def as_text(value: Any) -> str:
    """A YAML value as a person would type it behind an option."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _by_path(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {FLAGS.get(key, key): value for key, value in tree.items()}


def _chosen(file: ComparisonFile, variants: Sequence[str]) -> list[str]:
    """Names of the file's variants that are wanted, in the file's order."""
    for name in (*variants, *filter(None, (file.reference, file.baseline))):
        if name not in file.variants:
            raise ConfigError(
                f"variant {name!r} must be one of {', '.join(file.variants)}{did_you_mean(name, file.variants)}"
            )
    return [name for name in file.variants if not variants or name in variants]


def _expanded(
    own: Mapping[str, dict[str, str]], vary: Mapping[str, Sequence[str]], reference: str, baseline: str | None
) -> list[Variant]:
    """Variants, each that does not set a varied option as one for each of its values."""
    names: dict[tuple[str, frozenset[tuple[str, str]]], str] = {}
    for name, body in own.items():
        free = [path for path in vary if path not in body]
        for values in itertools.product(*(vary[path] for path in free)):
            pairs = tuple(zip(free, values, strict=True))
            full = re.sub(r"[^\w.+-]+", "_", "-".join([name, *(_word(path, text) for path, text in pairs)]))
            if full in names.values():
                raise ConfigError(f"two variants would be called {full!r}, which is their folder's name; rename one")
            names[name, frozenset(pairs)] = full
    variants: dict[str, Variant] = {}

    def named(other: str | None, pairs: frozenset[tuple[str, str]]) -> str | None:
        """The variant of that name whose varied options, if it has any, are these."""
        return next((full for (base, its), full in names.items() if base == other and its <= pairs), None)

    for (name, pairs), full in sorted(names.items(), key=lambda item: "ptq" in own[item[0][0]]):
        body, against = own[name], {"reference": named(reference, pairs), "baseline": named(baseline, pairs)}
        compared = {role: other for role, other in against.items() if other != full}
        options = {path: text for path, text in body.items() if path not in ("ptq", "of", "calibration")}
        quantized = _quantized(name, body, variants.get(named(body.get("of"), pairs) or "")) if "ptq" in body else None
        variants[full] = Variant(name=full, options=options | dict(pairs), quantized=quantized, **compared)
    return [variants[full] for full in names.values()]


def _quantized(name: str, body: Mapping[str, str], of: Variant | None) -> Quantized:
    strange = [path for path in body if path not in _QUANTIZED]
    if strange:
        raise ConfigError(
            f"variant {name!r} sets {strange[0]}, but it is quantized after training: it takes {', '.join(_QUANTIZED)}"
        )
    if of is None or of.quantized is not None:
        raise ConfigError(
            f"variant {name!r}: of {body.get('of')!r} must be a variant that is trained and compared too, in "
            f"{UNQUANTIZED}"
        )
    calibration = body.get("calibration")
    if calibration is not None and not calibration.isdecimal():
        raise ConfigError(f"variant {name!r}: calibration {calibration!r} must be a number of sequences")
    return Quantized(of, body["ptq"], None if calibration is None else int(calibration))


def _evaluation(options: Mapping[str, Any]) -> dict[str, str]:
    """Checked options of `qarl eval`."""
    for name, value in options.items():
        names = SUITES if name == "suite" else EVALUATION
        word = str(value) if name == "suite" else name
        if word not in names:
            raise ConfigError(f"evaluate: {word!r} must be one of {', '.join(names)}{did_you_mean(word, names)}")
    texts = {name: as_text(value) for name, value in options.items()}
    overridden({}, {f"eval.{name}": text for name, text in texts.items() if name not in ("suite", "data")})
    return texts


def _word(path: str, text: str) -> str:
    """A value in a variant's name; numbers and truths with their option."""
    if re.fullmatch(r"[-+.\d].*|true|false|null", text) is None:
        return text
    return f"{path.rpartition('.')[2]}-{text}"
