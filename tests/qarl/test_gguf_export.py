"""`qarl export --format gguf`: what it takes, what it writes, and what it refuses."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from qarl.cli.main import main
from qarl.configs.errors import ConfigError
from qarl.configs.load import config_from_tree
from qarl.report.run_folder import RunFolder
from qarl.rollout.types import RequestDefaults
from qarl.run.export_note import export_note, find_export
from qarl.run.gguf import NOTE, export_gguf
from qarl.sync.gguf.errors import GgufError
from qarl.sync.request_defaults import with_defaults
from tests.support.gguf_models import CHATML, toy_export

CONFIG = config_from_tree(
    {
        "scheme": "w4a16-g32",
        "task": {"system": "Be brief."},
        "rollout": {"stop": ["###"], "max_prompt_tokens": 40, "max_new_tokens": 24},
    }
)

DEFAULTS = RequestDefaults(
    system="Be brief.", stop=("###",), sampling={"temperature": 0.0}, max_new_tokens=24
)
"""How a run of `CONFIG` asks its policy."""


@pytest.fixture
def export(tmp_path: Path) -> Path:
    note = export_note(tmp_path / "my run", CONFIG, 3, tmp_path / "export")
    return toy_export(tmp_path, "llama", note=note, defaults=DEFAULTS)


def test_the_folder_has_a_file_and_its_sha256(export: Path, tmp_path: Path):
    output = tmp_path / "gguf"
    exported = export_gguf(export, output)
    file = output / "my-run-Q4_0.gguf"
    facts = json.loads((output / NOTE).read_text())
    assert sorted(path.name for path in output.iterdir()) == [NOTE, file.name]
    assert facts["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert facts["export"]["digest"] == json.loads((export / "qarl.json").read_text())["digest"]
    assert exported.written.name == file.name
    # 2 layers of 7 matrices; 2 norms each and the last; the embedding
    assert facts["tensors"] == {"Q4_0": 14, "F32": 5, "BF16": 1}


def test_the_file_says_what_it_was_made_of_and_has_the_chat_template(export: Path, tmp_path: Path):
    export_gguf(export, tmp_path / "gguf")
    fields = GGUFReader(tmp_path / "gguf" / "my-run-Q4_0.gguf").fields
    values = {name: field.contents() for name, field in fields.items()}
    assert values["general.architecture"] == "llama"
    assert values["general.name"] == "my-run"
    assert values["qarl.step"] == "3"
    assert values["qarl.scheme"] == "w4a16-g32"
    assert values["tokenizer.chat_template"] == with_defaults(CHATML, DEFAULTS)
    assert values["tokenizer.ggml.pre"] == "gpt-2"
    assert values["llama.context_length"] == 64
    assert values["llama.rope.dimension_count"] == 32
    assert values["llama.attention.head_count_kv"] == 2


def test_a_changed_export_is_refused_and_nothing_is_written(export: Path, tmp_path: Path):
    file = export / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight_packed"][0, 0] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(GgufError, match="was changed after it was exported"):
        export_gguf(export, tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()


def run_folder(path: Path, exported: int | None) -> Path:
    """Return a run folder without checkpoints, with an export of a step or none."""
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"steps": 9}))
    if exported is not None:
        (path / "export").mkdir()
        note = export_note(path, CONFIG, exported, path / "export")
        (path / "export" / "qarl.json").write_text(json.dumps(note))
    return path


def test_a_run_stands_for_its_export(tmp_path: Path):
    run = run_folder(tmp_path / "run", exported=9)
    assert find_export(run) == run / "export"


def test_a_run_without_an_export_is_refused_with_the_two_commands(tmp_path: Path):
    run = run_folder(tmp_path / "run", exported=None)
    with pytest.raises(ConfigError, match=r"has no export; write one \(qarl export .* -o DIR\)"):
        find_export(run)


def test_an_export_older_than_the_newest_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RunFolder, "steps", lambda self: [4, 9])
    run = run_folder(tmp_path / "run", exported=4)
    with pytest.raises(ConfigError, match="is of step 4, and its newest checkpoint of step 9"):
        find_export(run)


@pytest.mark.parametrize("option", ["--ptq rtn", "--scheme w4a16", "--calibration 3"])
def test_options_of_another_format_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["export", str(tmp_path), "-o", str(tmp_path / "new"), "--format", "gguf"]
    assert main([*command, *option.split()]) == 2
    assert f"{option} writes safetensors" in capsys.readouterr().err


def test_the_command_says_what_was_proven_and_what_differs(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["export", str(export), "-o", str(tmp_path / "new"), "--format", "gguf"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "20 of 20 tensors, read back, equal the export's" in words
    assert "log-probs are near those of the export, not equal" in words


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = str(tmp_path / "absent")
    assert main(["export", target, "-o", str(tmp_path / "new"), "--format", "gguf"]) == 2
    assert "there is no folder" in capsys.readouterr().err
