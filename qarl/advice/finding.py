"""What all advice is made of."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. level: a warning will likely spoil a run, or has spoilt it.
    about: what was looked at, or the configuration of several; "" where there is one. text:
    sentences. remedy: what to change, or "".
    """

    level: Level
    about: str
    text: str
    remedy: str = ""
