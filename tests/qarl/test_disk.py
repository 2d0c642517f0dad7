"""A disk that refuses, in a line. Blind spot: writers are not tried one by one; what they raise is."""

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from qarl.cli.main import run_command
from qarl.cli.parser import Parser
from qarl.configs.schema.run import RunConfig
from qarl.report import run_folder
from qarl.report.run_folder import RunFolder


def by_text(file: Path) -> None:
    file.write_text("x")


def by_rust(_file: Path) -> None:
    raise SafetensorError(f"Error while serializing: I/O error: No space left on device (os error {errno.ENOSPC})")


@pytest.mark.parametrize("write", [by_text, by_rust])
def test_a_full_disk_is_one_line(write, capsys: pytest.CaptureFixture[str]):
    parser = Parser(prog="qarl")
    parser.set_defaults(run=lambda *_: write(Path("/dev/full")), fields=False, engine=False)
    assert run_command(parser, []) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert message.startswith("disk: cannot write") and "No space left on device; make room" in message


def test_other_errors_stay_what_they_are():
    parser = Parser(prog="qarl")
    parser.set_defaults(run=lambda *_: by_text(Path("/proc/none/x")), fields=False, engine=False)
    with pytest.raises(FileNotFoundError):
        run_command(parser, [])


def test_a_run_folder_that_cannot_be_filled_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "describe_environment", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder.create(RunConfig(model="tiny-qwen3", output=str(tmp_path / "some" / "run")))
    assert not [*tmp_path.iterdir()]
