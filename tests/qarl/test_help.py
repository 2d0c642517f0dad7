"""`qarl train --help` and `--help-all`: what is in them, that they fit, and that any terminal can
show them.
"""

import io
import sys
from unittest.mock import Mock

import pytest

from qarl.cli.help import GROUPS, written
from qarl.cli.main import main
from qarl.configs.flags import FLAGS
from qarl.configs.load import default_config, field_paths, load_config


def shown(
    option: str,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """Return the lines of `qarl train OPTION` in a terminal of the given width in columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["train", option]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [80, 200])
def test_help_fits_two_screens(columns: int, monkeypatch, capsys):
    lines = shown("--help", columns, monkeypatch, capsys)
    assert len(lines) <= 90
    assert max(map(len, lines)) <= columns


def test_help_has_the_default_commands_defaults_and_every_short_flag_in_one_group(
    monkeypatch, capsys
):
    assert sorted(flag for names in GROUPS.values() for flag in names) == sorted(FLAGS)
    text = " ".join(" ".join(shown("--help", 80, monkeypatch, capsys)).split())
    steps = load_config(default_config(None), {}).steps
    described = "Number of training steps. Raise it if the reward still rises at the end."
    assert f"--steps N {described} [{steps}]" in text
    assert "[tiny-qwen3]" in text
    assert all(name in text for name in ("tbpo", "sapo", "pg_seq_is")), "the objectives are named"


def test_a_command_does_not_read_the_defaults_that_only_its_help_shows(monkeypatch, capsys):
    unread = Mock(side_effect=AssertionError("read for a help that is not shown"))
    monkeypatch.setattr("qarl.cli.help.default_values", unread)
    monkeypatch.setattr("qarl.cli.sft._default_values", unread)
    assert main(["train", "--dry-run"]) == 0
    assert "model: tiny-qwen3" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_all_has_every_field_once(columns: int, monkeypatch, capsys):
    lines = shown("--help-all", columns, monkeypatch, capsys)
    assert max(map(len, lines)) <= columns
    named = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(named) == sorted(f"--{path}" for path in field_paths())


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_can_be_written_in_ascii(option: str, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["train", option]) == 0
    sys.stdout.flush()
    assert "PATTERN=SCHEME,?" in raw.getvalue().decode("ascii")


def test_defaults_read_as_they_are_typed():
    numbers = [
        (5e-4, "5e-4"),
        (1.5e-3, "1.5e-3"),
        (0.0, "0"),
        (65536.0, "65536"),
    ]
    others = [
        (True, "true"),
        (None, ""),
        ((), ""),
        ((0.9, 0.95), "0.9,0.95"),
        ({"a": 2}, "{a: 2}"),
    ]
    for value, text in numbers + others:
        assert written(value) == text
