"""Prove that a trainer and an engine hold the same policy, whoever made them.

    report = qarl.verify.weights("masters/", "export/")  # layer by layer
    report = qarl.verify.logprobs("rollouts.parquet")  # token by token
    qarl.verify.assert_agreement(report)  # in a test

Neither QaRL's trainer nor its engine is needed. Importing this package imports neither torch nor
vLLM. docs/guide/verify.md describes both comparisons.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names' types for type checkers and editors; `x as x` re-exports
    from qarl.quant.kernels.held_weights import HeldWeights as HeldWeights
    from qarl.verify.compare_logprobs import LogprobsReport as LogprobsReport
    from qarl.verify.compare_logprobs import logprobs as logprobs
    from qarl.verify.compare_weights import WeightsReport as WeightsReport
    from qarl.verify.compare_weights import weights as weights
    from qarl.verify.findings import Cause as Cause
    from qarl.verify.findings import DisagreementError as DisagreementError
    from qarl.verify.findings import Report as Report
    from qarl.verify.findings import VerifyInputError as VerifyInputError
    from qarl.verify.findings import assert_agreement as assert_agreement

_MODULE_OF = {
    "Cause": "qarl.verify.findings",
    "DisagreementError": "qarl.verify.findings",
    "HeldWeights": "qarl.quant.kernels.held_weights",
    "LogprobsReport": "qarl.verify.compare_logprobs",
    "Report": "qarl.verify.findings",
    "VerifyInputError": "qarl.verify.findings",
    "WeightsReport": "qarl.verify.compare_weights",
    "assert_agreement": "qarl.verify.findings",
    "logprobs": "qarl.verify.compare_logprobs",
    "weights": "qarl.verify.compare_weights",
}
"""Public names and the modules that define them."""

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'qarl.verify' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
