"""Phases as a person sees them: at once, or once they take long."""

import io
import time

import pytest
from rich.console import Console

from qarl.report.startup import phase, phases_shown_on


def test_a_phase_is_told_once_it_takes_long():
    """On a line of its own, with its seconds, also where it fails; a short one leaves nothing."""
    console = Console(file=io.StringIO(), width=80)
    with phases_shown_on(console, after=0.2):
        with phase("short"):
            pass
        with phase("long"):
            time.sleep(0.3)
        with pytest.raises(ValueError, match="lost"), phase("failing"):
            _fail()
    with phases_shown_on(console), phase("told at once"):
        assert console.file.getvalue().endswith("told at once … ")  # type: ignore[attr-defined]
    long, failing, at_once = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert long.startswith("long … 0.") and long.endswith(" s")
    assert failing == "failing … " and at_once.startswith("told at once … 0.")


def _fail() -> None:
    time.sleep(0.3)
    raise ValueError("lost")
