"""Phases as a person sees them."""

import io

import pytest
from rich.console import Console

from qarl.report.startup import phase, phases_shown_on


def test_a_phase_is_shown_at_once_and_its_seconds_at_its_end():
    """On a line of its own, also where it fails."""
    file = io.StringIO()
    with phases_shown_on(Console(file=file, width=80)):
        with phase("loading"):
            assert file.getvalue() == "loading … "
        with pytest.raises(ValueError, match="lost"), phase("failing"):
            raise ValueError("lost")
    loading, failing = file.getvalue().splitlines()
    assert loading.startswith("loading … 0.") and loading.endswith(" s") and failing == "failing … "
