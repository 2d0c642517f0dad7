"""Reads comparisons from YAML files and a command's options."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from qarl.compare.comparison import Comparison, Figure, Quantized, Variant
from qarl.configs.errors import ConfigError
from qarl.configs.flags import FLAGS
from qarl.configs.load import field_paths, overridden
from qarl.configs.schema.base import LARGEST_SEED, Section, Text
from qarl.configs.validation_messages import validation_messages
from qarl.configs.words import did_you_mean, quoted
from qarl.configs.yaml_file import as_text, as_texts, read_yaml
from qarl.evaluation.suites import SUITES

EVALUATION = ("suite", "data", "problems", "samples", "temperature", "top_p", "top_k")
"""Options of `qarl eval` that a comparison may set."""

DEFAULT_FIGURES = {
    "reward": "reward last 10",
    "entropy": "learn/entropy last 10",
    "|Δ log p|": "learn/mismatch/mean_abs last 10",
    "|log w|": "learn/mismatch/mean_abs_log_w last 10",
    "error tokens": "error_tokens last 10",
    "clipped": "learn/clipped last 10",
    "s/step": "seconds mean",
}
"""Columns of figures, and the figure in each."""
_QUANTIZED = ("ptq", "of", "calibration", "scheme")
"""Keys of a variant that is quantized after training."""

_REMEDIES = {
    "seed": "every variant is run with every seed of --seeds, or of `seeds` in the file",
    "output": "--output names the folder of all runs, and each has a folder of its own in it",
    "export": "every run is exported, since exports are what is compared",
}
"""Options that a comparison sets itself, with the remedy for each."""


def _bodies(variants: Any) -> dict[str, Any]:
    """Return the options of each variant; raise `ValueError` if they are none."""
    if not isinstance(variants, dict) or not variants:
        raise ValueError(
            f"{quoted(variants)} must be named options, such as {{plain: {{aligned: false}}}}"
        )
    bodies = {str(name): {} if body is None else body for name, body in variants.items()}
    for name, body in bodies.items():
        if not isinstance(body, dict):
            raise ValueError(f"{name} {quoted(body)} must be options, such as {{aligned: false}}")
    return bodies


class ComparisonFile(Section):
    """Content of a comparison's YAML file."""

    config: Text | None = Field(
        default=None,
        description="configuration of all runs: a YAML file or a shipped name",
    )
    options: dict[str, Any] = Field(default={}, description="of `qarl train`, for all runs")
    seeds: tuple[Annotated[int, Field(ge=0, le=LARGEST_SEED)], ...] = Field(
        default=(0, 1, 2), description="of runs"
    )
    variants: Annotated[dict[str, dict[str, Any]], BeforeValidator(_bodies)] = Field(
        description="name → options of `qarl train`, or of a quantized run"
    )
    vary: dict[str, list[Any]] = Field(
        default={}, description="option → values; variants that do not set it have each"
    )
    reference: Text | None = Field(
        default=None, description="variant that others are compared with, or the first"
    )
    baseline: Text | None = Field(
        default=None, description="variant whose gap to the reference is to be closed"
    )
    evaluate: dict[str, Any] = Field(
        default={}, description="options of `qarl eval`, asked besides the run's own"
    )
    figures: dict[str, str] = Field(
        default=DEFAULT_FIGURES, description="column → METRIC mean, first N, last N, …"
    )


def shipped_comparisons() -> list[str]:
    """Return the names of the shipped comparisons."""
    names = [file.name for file in (files("qarl.configs") / "compare").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_comparison(name: str) -> ComparisonFile:
    """Read a YAML file by path, or a shipped one by name.

    Raises `ConfigError` if there is neither, or if the file is wrong.
    """
    path = Path(name)
    if not path.is_file():
        if name not in shipped_comparisons():
            raise ConfigError(
                f"no comparison file {name!r}, and no shipped one of that name"
                f" ({', '.join(shipped_comparisons())}){did_you_mean(name, shipped_comparisons())}"
            )
        path = Path(str(files("qarl.configs") / "compare" / f"{name}.yaml"))
    tree = read_yaml(path)
    try:
        return ComparisonFile.model_validate(tree)
    except ValidationError as error:
        text = validation_messages(
            error, ComparisonFile.model_fields, lambda loc: ".".join(map(str, loc))
        )
        raise ConfigError(f"comparison {name}: {text}") from error


def varied(vary: Mapping[str, Sequence[str]]) -> ComparisonFile:
    """Return a comparison without a file: a variant for each value of the first option.

    The other options of `vary` vary each of these variants.
    """
    (path, values), *others = vary.items()
    variants = {_word(path, text): {path: text} for text in values}
    return ComparisonFile(variants=variants, vary={name: list(texts) for name, texts in others})


def make_comparison(
    file: ComparisonFile,
    output: Path,
    options: Mapping[str, str],
    vary: Mapping[str, Sequence[str]] | None = None,
    variants: Sequence[str] = (),
    seeds: Sequence[int] = (),
    config: str | None = None,
) -> Comparison:
    """Make the comparison of a file and a command's options.

    Args:
        file: Content of the file.
        output: Folder of all runs.
        options: Dotted path → text. They override the file's options; a variant's override them.
        vary: Option → values, in addition to the file's.
        variants: Names of the variants to run. Default: all.
        seeds: Seeds of the runs. Default: the file's.
        config: Configuration file or shipped name. Default: the file's.

    Raises:
        ConfigError: An option is unknown, chosen by the comparison itself, or has no effect.
    """
    bodies = {name: option_texts(file.variants[name]) for name in _chosen(file, variants)}
    file_vary = {
        FLAGS.get(name, name): [as_text(value) for value in values]
        for name, values in file.vary.items()
    }
    vary = {**file_vary, **(vary or {})}
    shared = option_texts(file.options) | dict(options)
    for path in (*shared, *vary, *itertools.chain(*bodies.values())):
        if path in _REMEDIES:
            raise ConfigError(f"{path} is chosen by the comparison: {_REMEDIES[path]}")
    shown_vary = {path: ",".join(values) for path, values in vary.items()}
    for path, text in {**options, **shown_vary}.items():
        if all(path in body for body in bodies.values()):
            raise ConfigError(
                f"--{path} {text}: every variant sets {path} itself ({', '.join(bodies)}); omit it"
            )
    reference = file.reference or next(iter(bodies))
    comparison = Comparison(
        output=output,
        config=config or file.config,
        options=shared,
        seeds=tuple(dict.fromkeys(seeds or file.seeds)),
        variants=tuple(_expanded(bodies, vary, reference, file.baseline)),
        evaluate=_evaluation(file.evaluate),
        figures={name: Figure.parse(name, text) for name, text in file.figures.items()},
    )
    if not comparison.seeds:
        raise ConfigError("seeds [] must hold at least one, such as [0, 1, 2]")
    return comparison


def option_texts(
    tree: Mapping[str, Any],
    prefix: str = "",
) -> dict[str, str]:
    """Return a mapping's options as texts by dotted path, as on a command line.

    Keys may be short flags, dotted paths or sections.
    """
    fields = field_paths()
    texts = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in fields:
            inner = option_texts(value, f"{path}.")
        else:
            inner = {FLAGS.get(path, path): as_text(value)}
        for name, text in inner.items():
            if name in texts:
                raise ConfigError(
                    f"option {name} is given twice, with {texts[name]!r} and {text!r}; give it once"
                )
            texts[name] = text
    return texts


def _chosen(file: ComparisonFile, variants: Sequence[str]) -> list[str]:
    """Return the names of the variants to run, in the file's order. variants: default: all."""
    for name in (*variants, *filter(None, (file.reference, file.baseline))):
        if name not in file.variants:
            raise ConfigError(
                f"variant {name!r} must be one of"
                f" {', '.join(file.variants)}{did_you_mean(name, file.variants)}"
            )
    return [name for name in file.variants if not variants or name in variants]


def _expanded(
    bodies: Mapping[str, dict[str, str]],
    vary: Mapping[str, Sequence[str]],
    reference: str,
    baseline: str | None,
) -> Iterator[Variant]:
    """Yield the variants; one that leaves a varied option open becomes one per value of it."""
    names: dict[tuple[str, frozenset[tuple[str, str]]], str] = {}
    for base, body in bodies.items():
        free = [path for path in vary if path not in body]
        for values in itertools.product(*(vary[path] for path in free)):
            pairs = tuple(zip(free, values, strict=True))
            words = [base, *(_word(path, text) for path, text in pairs)]
            name = re.sub(r"[^\w.+-]+", "_", "-".join(words))
            if name in names.values():
                raise ConfigError(
                    f"two variants would be called {name!r}, which is their folder's name;"
                    " rename one"
                )
            names[base, frozenset(pairs)] = name

    def partner(
        base: str | None,
        pairs: frozenset[tuple[str, str]],
    ) -> str | None:
        """Return the name of the variant that `base` became for these values, ignoring those that
        `base` sets itself; None if there is none.
        """
        matching = (
            name
            for (other, other_pairs), name in names.items()
            if other == base and other_pairs <= pairs
        )
        return next(matching, None)

    for (base, pairs), name in names.items():
        body = bodies[base]
        quantized = None
        options = body
        if "ptq" in body:
            quantized = _quantized(base, body, partner(body.get("of"), pairs), bodies)
            options = {"scheme": body["scheme"]} if "scheme" in body else {}
        partners = {
            "reference": partner(reference, pairs),
            "baseline": partner(baseline, pairs),
        }
        # a variant is not compared with itself
        partners = {role: other for role, other in partners.items() if other != name}
        yield Variant(
            name=name, options={**options, **dict(pairs)}, quantized=quantized, **partners
        )


def _quantized(
    name: str,
    body: Mapping[str, str],
    source: str | None,
    bodies: Mapping[str, Mapping[str, str]],
) -> Quantized:
    """Return a variant's quantization. source: name of the variant it quantizes, if it exists."""
    unknown = [path for path in body if path not in _QUANTIZED]
    if unknown:
        raise ConfigError(
            f"variant {name!r} sets {unknown[0]}, but it is quantized after training: it takes"
            f" {', '.join(_QUANTIZED)}"
        )
    if source is None or "ptq" in bodies[body["of"]]:
        raise ConfigError(
            f"variant {name!r}: of {body.get('of')!r} must be a variant that is trained and"
            " compared too"
        )
    calibration = body.get("calibration")
    if calibration is not None and not calibration.isdecimal():
        raise ConfigError(
            f"variant {name!r}: calibration {calibration!r} must be a number of sequences"
        )
    return Quantized(source, body["ptq"], None if calibration is None else int(calibration))


def _evaluation(options: Mapping[str, Any]) -> dict[str, str]:
    """Check options of `qarl eval`, and return them as texts."""
    for name, value in options.items():
        names = SUITES if name == "suite" else EVALUATION
        word = str(value) if name == "suite" else name
        if word not in names:
            raise ConfigError(
                f"evaluate: {word!r} must be one of {', '.join(names)}{did_you_mean(word, names)}"
            )
    texts = as_texts(options)
    fields = {name: text for name, text in texts.items() if name not in ("suite", "data")}
    overridden({}, {f"eval.{name}": text for name, text in fields.items()})  # checks the values
    return texts


def _word(path: str, text: str) -> str:
    """Return a value for a variant's name; a number or a truth value gets its option before it."""
    if re.fullmatch(r"[-+.\d].*|true|false|null", text) is None:
        return text
    return f"{path.rpartition('.')[2]}-{text}"
