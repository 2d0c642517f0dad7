"""Tests of stored answers about the machine: each is computed once, computed again if anything it
depends on changes, and a broken cache is no obstacle.
"""

import gc
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from qarl.cli.main import main
from qarl.quant.kernels import supported
from qarl.quant.kernels.supported import Support, kept_support
from qarl.quant.runtime import answers
from qarl.quant.runtime.imports import collections_paused


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QARL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_answer_is_stored_per_question():
    assert answers.read_answer("support", {"scheme": "a"}) is None
    answers.keep_answer("support", {"scheme": "a"}, {"kernel": "k"})
    assert answers.read_answer("support", {"scheme": "a"}) == {"kernel": "k"}
    assert answers.read_answer("support", {"scheme": "b"}) is None
    assert answers.read_answer("schemes", {"scheme": "a"}) is None


@pytest.mark.parametrize("part", ["python", "libraries", "code", "cpu", "gpus", "driver"])
def test_another_machine_or_software_version_computes_the_answer_again(
    part: str, monkeypatch: pytest.MonkeyPatch
):
    answers.keep_answer("support", {}, 1)
    changed = {**answers.surroundings(), part: "other"}
    monkeypatch.setattr(answers, "surroundings", lambda: changed)
    assert answers.read_answer("support", {}) is None


def test_a_variable_that_chooses_kernels_computes_the_answer_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answers, "surroundings", answers.surroundings.__wrapped__)
    answers.keep_answer("support", {}, 1)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert answers.read_answer("support", {}) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert answers.read_answer("support", {}) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"question": {}}', '{"question": {"a": 1}, "answer": 2}', "\xff"],
)
def test_a_damaged_cache_file_is_ignored(cache: Path, text: str):
    answers.keep_answer("support", {}, 1)
    (file,) = (cache / "answers").iterdir()
    file.write_bytes(text.encode("latin-1"))
    assert answers.read_answer("support", {}) is None
    answers.keep_answer("support", {}, 2)
    assert answers.read_answer("support", {}) == 2


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QARL_CACHE", str(tmp_path / "file" / "cache"))
    answers.keep_answer("support", {}, 1)
    assert answers.read_answer("support", {}) is None


def test_kernels_are_probed_once_per_machine(cache: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def ask(scheme: str, *_: object) -> Support:
        asked.append(scheme)
        return Support("", "no")

    monkeypatch.setattr(supported, "support", ask)
    for _ in range(2):
        assert kept_support("w4a16", torch.bfloat16) == Support("", "no")
    assert asked == ["w4a16"]
    for file in (cache / "answers").iterdir():
        kept = json.loads(file.read_text())
        file.write_text(json.dumps({**kept, "answer": {"kernel": 1}}))
    kept_support("w4a16", torch.bfloat16)
    assert asked == ["w4a16"] * 2, "an answer of another shape is none"


def test_the_second_list_of_schemes_imports_neither_torch_nor_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The second process inherits this one's environment. vLLM changed that, so the environment
    counts as it is at the end.
    """
    monkeypatch.setattr(answers, "surroundings", answers.surroundings.__wrapped__)
    assert main(["schemes"]) == 0
    first = capsys.readouterr().out
    code = (
        "import sys; from qarl.cli.main import main; status = main(['schemes']); "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    second = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert second.stdout == first


def test_the_second_check_of_a_model_imports_neither_vllm_nor_reasoning_gym(
    cache: Path, real_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """They take longer to import than all the rest that is checked. The status depends on the
    machine's memory, but not on whether the cache answers.
    """
    monkeypatch.setattr(answers, "surroundings", answers.surroundings.__wrapped__)
    line = ["check", "smollm2-135m", "--model", str(real_model), "--output", str(cache / "run")]
    status = main(line)
    code = (
        f"import sys; from qarl.cli.main import main; status = main({line!r})\n"
        "print({'vllm', 'reasoning_gym', 'matplotlib', 'numba'} & set(sys.modules), status)"
    )
    second = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert second.stdout.splitlines()[-1] == f"set() {status}", second


def test_collections_go_on_after_an_import_that_fails():
    with pytest.raises(ImportError), collections_paused():
        import_module("qarl.missing")
    assert gc.isenabled()
    with collections_paused():
        assert not gc.isenabled()
