"""The finding, of which `qarl check`, `qarl mismatch` and `qarl report` make their verdicts."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "warning"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    """Severity: a warning will probably spoil a run, or has spoilt it."""

    about: str
    """Subject of the check, or the configuration if there are several; "" if there is one."""

    text: str
    """The result in sentences."""

    remedy: str = ""
    """The change that would help, or ""."""
