"""Methods of post-training quantization, the schemes each fits, and limits of calibration data."""

from collections.abc import Callable
from dataclasses import dataclass

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.quant.schemes import Scheme, is_integer

CALIBRATION = 256
"""Default number of calibration sequences."""
MAX_CALIBRATION_TOKENS = 4 * 2**20
"""Upper bound on the tokens of a calibration set: every layer's inputs of all are in memory."""


@dataclass(frozen=True)
class Method:
    """A method of post-training quantization."""

    calibrated: bool
    """True if it uses calibration data."""
    wants: str
    """Schemes that it fits, in words."""
    fits: Callable[[Scheme], bool]
    """Returns whether it fits a scheme."""


def _low_bit(scheme: Scheme) -> bool:
    return scheme.quantization is not None


def _weight_only_int4(scheme: Scheme) -> bool:
    weights = scheme.weights
    return (
        weights is not None
        and scheme.activations is None
        and is_integer(weights)
        and weights.num_bits == 4
    )


def _int8_both(scheme: Scheme) -> bool:
    both = (scheme.weights, scheme.activations)
    return all(args is not None and is_integer(args) and args.num_bits == 8 for args in both)


METHODS = {
    "rtn": Method(False, "any low-bit scheme", _low_bit),
    "gptq": Method(True, "weight-only schemes and those with dynamic activations", _low_bit),
    "awq": Method(True, "weight-only int4 schemes", _weight_only_int4),
    "smoothquant": Method(True, "int8 weights with int8 activations", _int8_both),
}
"""rtn: round to nearest. gptq: arXiv 2210.17323. awq: arXiv 2306.00978. smoothquant: arXiv
2211.10438.
"""


def methods_for(scheme: Scheme) -> tuple[str, ...]:
    """Return the names of the methods that fit this scheme; none fits the unquantized one."""
    return tuple(name for name, method in METHODS.items() if method.fits(scheme))


def check_method(name: str, scheme: Scheme) -> None:
    """Raise `ConfigError` for an unknown method, or one that does not fit this scheme."""
    if name not in METHODS:
        raise ConfigError(
            f"unknown post-training quantization {name!r}: known are {', '.join(METHODS)}"
        )
    fitting = methods_for(scheme)
    if name not in fitting:
        remedy = (
            f"methods for {scheme.name!r}: {', '.join(fitting)}"
            if fitting
            else "choose another --scheme"
        )
        raise ConfigError(
            f"method {name!r} is for {METHODS[name].wants}, not for {scheme.name!r}; {remedy}"
        )


def calibration_count(name: str, requested: int | None, config: RunConfig) -> int:
    """Return how many sequences method `name` is calibrated with.

    requested: number of sequences. Default: `CALIBRATION` if the method uses data. Raises
    `ConfigError` for a number with a method without data, for an empty set, and for a set that may
    have more tokens than `MAX_CALIBRATION_TOKENS`. The run's limits bound the length of a sequence.
    """
    if not METHODS[name].calibrated:
        if requested is not None:
            raise ConfigError(
                f"--calibration {requested}: method {name!r} looks at no data; leave the option out"
            )
        return 0
    count = CALIBRATION if requested is None else requested
    if count < 1:
        raise ConfigError(
            f"--calibration {count}: an empty set calibrates nothing; give at least 1, or --ptq rtn"
        )
    longest = config.rollout.longest
    if count * longest > MAX_CALIBRATION_TOKENS:
        raise ConfigError(
            f"--calibration {count}: sequences of up to {longest} tokens (the run's"
            f" rollout.max_prompt_tokens + rollout.max_new_tokens) may come to {count * longest}"
            f" tokens, above {MAX_CALIBRATION_TOKENS}; give --calibration"
            f" {MAX_CALIBRATION_TOKENS // longest} or less"
        )
    return count
