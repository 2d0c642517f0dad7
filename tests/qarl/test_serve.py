"""`qarl serve`: what it refuses, what it starts, and over HTTP the engine's own tokens."""

import json
import os
import socket
from pathlib import Path

import pytest

from qarl.cli.main import main
from qarl.cli.serve import OTHERWISE, asked_otherwise, find_served
from qarl.configs.load import config_file, load_config
from qarl.quant.checkpoint.folder import file_digests
from qarl.rollout.servers.vllm.start import server_command
from qarl.run.export_note import add_to_note, changes_in_words, export_note


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent a command that is not refused from replacing this process."""
    monkeypatch.delattr(os, "fork")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return a folder that looks like an exported checkpoint from outside."""
    folder = tmp_path / "a policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "float16"}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def run(export: Path, tmp_path: Path) -> Path:
    """Return a run folder around the export, with 64 + 8 tokens."""
    config = load_config(
        config_file("tiny-qwen3"), {"dtype": "float16", "rollout.kv_cache_gib": "3"}
    )
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    (export / "qarl.json").write_text(json.dumps(export_note(folder, config, 3, folder / "export")))
    export.rename(folder / "export")
    return folder


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["serve", *arguments]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_served_is_refused(tmp_path: Path, run: Path, capsys):
    (run / "export" / "model.safetensors").unlink()
    assert "has no weights" in refusal([str(run)], capsys)
    (run / "export").rename(tmp_path / "elsewhere")
    assert "ended before its first checkpoint" in refusal([str(run)], capsys)
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    (run / "checkpoints" / "step-000001" / "manifest.json").touch()
    assert f"qarl train --resume {run}" in refusal([str(run)], capsys)


def test_a_taken_port_is_refused(run: Path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}" in refusal(
            [str(run), "--port", str(port)], capsys
        )
    assert "allowed are 1 to 65535" in refusal([str(run), "--port", "99999"], capsys)
    assert "cannot listen at nowhere.invalid:8000" in refusal(
        [str(run), "--host", "nowhere.invalid"], capsys
    )


def test_a_run_is_served_as_its_engine_ran(run: Path):
    served = find_served(run)
    assert served.folder == run / "export"
    assert served.name == "run"
    assert served.dtype == "float16"
    assert (served.max_model_len, served.kv_cache_gib) == (72, 3)
    command = server_command(served, "127.0.0.1", 8000, ["--max-model-len", "50"])
    assert command[-2:] == [
        "--max-model-len",
        "50",
    ], "what the user asks of vLLM comes last, and wins"
    assert command[command.index("--dtype") + 1] == "float16"


def test_an_export_alone_is_served_with_its_own_dtype(export: Path):
    served = find_served(export)
    assert served.name == "a policy"
    assert served.dtype == "float16"
    assert served.max_model_len is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", '{"repetition_penalty": 1.5}'),
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer.json", None),
        ("config.json", '{"dtype": "float16", "rope_theta": 1}'),
    ],
)
def test_files_changed_since_the_export_was_written_are_named(
    name: str, content: str | None, run: Path
):
    """Contract: changed, added and removed files are named, and an untouched export names none."""
    export = run / "export"
    (export / "tokenizer.json").write_text("{}")
    (export / "generation_config.json").write_text("{}")
    assert changes_in_words(export) is None, "no digests were noted"
    add_to_note(export, files=file_digests(export))
    assert changes_in_words(export) is None
    if content is None:
        (export / name).unlink()
    else:
        (export / name).write_text(content)
    words = changes_in_words(export)
    assert words is not None
    assert words.startswith(f"{name} changed since the export was written")


def test_options_of_vllm_that_change_answers_are_named():
    """Contract: each option that asks otherwise than the evaluation has a line, however it is
    written, and no other option has one. Blind spot: options that a later vLLM adds.
    """
    for name in OTHERWISE:
        for words in ([f"--{name}", "x"], [f"--{name}=x"], [f"--{name.replace('-', '_')}", "x"]):
            (line,) = asked_otherwise(["--max-model-len", "64", *words, "--api-key", "--dtype-x"])
            assert line.startswith(f"--{name}: ")
    assert asked_otherwise(["--port", "1", "chat-template"]) == []


def test_vllm_has_the_options_that_change_answers():
    """Contract: the options are vLLM's own, so that a line is never about a name of the past."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser()).format_help()
    assert [name for name in OTHERWISE if f"--{name}" not in known] == []
