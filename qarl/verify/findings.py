"""What a comparison of two sides found: its causes, and what it could not compare; the assertion
for tests.

This module imports nothing heavy.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from qarl.configs.errors import InputError, QarlError

Level = Literal["fault", "note"]


class VerifyInputError(InputError, heading="verify"):
    """Input of a comparison that cannot be read, or that holds values it cannot hold."""


class DisagreementError(QarlError, AssertionError, heading="disagreement"):
    """Two sides that were asserted to agree do not."""


@dataclass(frozen=True)
class Cause:
    """One reason for which two sides differ, with its evidence."""

    name: str
    """Name of the cause, one of those in docs/guide/verify.md."""
    level: Level
    """"fault" if the sides are two policies by it; "note" if it is expected or harmless."""
    evidence: str
    """The measurement that shows it."""
    remedy: str = ""
    """The change that would help; "" for notes that need none."""
    about: tuple[str, ...] = ()
    """Layers or rows it was seen in; () if it is about all."""


def fault(name: str, layer: str, evidence: str, remedy: str = "") -> Cause:
    """Return a cause for which the sides are two policies, seen in one layer."""
    return Cause(name=name, level="fault", evidence=evidence, remedy=remedy, about=(layer,))


@dataclass(frozen=True)
class Report:
    """Outcome of one comparison."""

    causes: tuple[Cause, ...]
    """What was found, faults first."""
    unchecked: tuple[str, ...]
    """What was not compared, in sentences."""

    compared: ClassVar[str]
    """What the two sides hold, in two words."""

    @property
    def agrees(self) -> bool:
        """Return whether no fault was found in what was compared."""
        return not self.faults

    @property
    def faults(self) -> tuple[Cause, ...]:
        """Return the causes for which the sides are two policies."""
        return tuple(cause for cause in self.causes if cause.level == "fault")

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"agrees": self.agrees, **asdict(self)}

    def lines(self, width: int = 80) -> list[str]:
        """Return the report as lines of at most `width` characters."""
        raise NotImplementedError


def assert_agreement(report: Report, complete: bool = False) -> None:
    """Raise `DisagreementError`, an `AssertionError`, if a comparison found a fault.

    Args:
        report: Return value of `qarl.verify.weights` or `qarl.verify.logprobs`.
        complete: Raise also if something was not compared.
    """
    if report.faults or (complete and report.unchecked):
        raise DisagreementError("\n".join(["", *report.lines(100)]))
