"""Digests of a run's inputs, and what a resumed run does when they differ.

tests/runs/ resumes whole runs. Blind spots: data that a function opens by itself, and installed
packages.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qarl.configs.load import config_from_tree
from qarl.configs.schema.run import RunConfig
from qarl.report.run_folder import ChangedInputsError, RunFolder, with_absolute_paths
from qarl.run import inputs
from qarl.run.checkpoint import save_checkpoint
from qarl.run.inputs import digest_inputs, require_same_inputs
from qarl.tasks import load_task

FILES = {
    "q.jsonl": '{"question": "1 + 1", "answer": "2"}\n{"question": "1 + 2", "answer": "3"}\n',
    "mine.py": "from rules import right\n\n\ndef f(problem, text):\n    return right(text)\n",
    "rules.py": "import deep.limits\n\n\ndef right(text):\n    return 1.0\n",
    "deep/limits.py": "from . import numbers\n",
    "deep/numbers.py": "LIMIT = 1\n",
    "unused.py": "",
    "model/config.json": "{}",
    "model/chat_template.jinja": "{{ messages }}",
    "model/model.safetensors": "weights",
    "model/README.md": "a card",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Write questions, a reward with its modules and a model's files into the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    return config_from_tree(
        {"model": "model", "task": {"name": "q.jsonl", "reward": "mine.py:f=1, exact=0.5"}}
    )


def digests(config: RunConfig) -> dict[str, str]:
    rows = config.task.model_copy(update={"reward": None})  # which starts no process
    return digest_inputs(config, load_task(rows))


CHANGES = {
    "q.jsonl": "questions q.jsonl",
    "mine.py": "task.reward mine.py",
    "rules.py": "task.reward rules.py",
    "deep/limits.py": "task.reward deep/limits.py",
    "deep/numbers.py": "task.reward deep/numbers.py",
    "model/config.json": "model config.json",
    "model/chat_template.jinja": "model chat_template.jinja",
    "model/model.safetensors": "model model.safetensors",
}


def test_an_input_that_changes_changes_its_own_digest_alone(run: RunConfig):
    before = digests(run)
    for file, name in CHANGES.items():
        text = Path(file).read_text()
        Path(file).write_text(text.replace("1", "3") + "\n")
        now = digests(run)
        Path(file).write_text(text)
        assert [each for each in now if now[each] != before[each]] == [name], file
    assert set(before) == set(CHANGES.values())


@pytest.mark.parametrize("seed", range(8))
def test_any_inputs_that_change_together_are_named(
    seed: int, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Drawn: which of the files change or go, besides files that are no inputs."""
    draw = random.Random(seed)
    folder = folder_of(tmp_path, digests(run))
    files = sorted(file for file in CHANGES if file.startswith(("model/", "q.", "deep/")))
    changed = draw.sample(files, draw.randint(1, len(files)))
    for file in [*changed, "unused.py", "model/README.md"]:
        Path(file).write_text(Path(file).read_text().replace("1", "5") + "\n")
    gone = draw.sample(["model/chat_template.jinja", "model/config.json"], draw.randint(0, 1))
    for file in gone:
        Path(file).unlink()
    now = digests(run)
    with pytest.raises(ChangedInputsError) as refused:
        require_same_inputs(run, folder, now, allow_changes=False)
    names = {CHANGES[file] for file in {*changed, *gone}}
    assert {name for name in CHANGES.values() if f"{name}:" in str(refused.value)} == names
    assert "unused.py" not in str(refused.value)
    said: list[str] = []
    monkeypatch.setattr(inputs, "say", said.append)
    require_same_inputs(run, folder, now, allow_changes=True)
    assert all(f"{name}:" in "\n".join(said) for name in names)


def test_what_is_no_input_changes_nothing(run: RunConfig):
    before = digests(run)
    Path("unused.py").write_text("X = 1\n")
    Path("model/README.md").write_text("another card")
    Path("model/trainer_state.json").write_text("{}")
    os.utime("mine.py", (1, 1))
    assert digests(run) == before
    assert digests(with_absolute_paths(run)) == before, "as a resumed run names them"


def test_large_weights_are_told_apart_by_samples(run: RunConfig, monkeypatch: pytest.MonkeyPatch):
    """Training changes all bytes. A change of few bytes between samples is not noticed."""
    monkeypatch.setattr(inputs, "_LARGEST_COMPLETE", 1000)
    generator = torch.Generator().manual_seed(0)
    file = Path("model/model.safetensors")
    seen = set()
    for size in (2**21, 2**21, 2**21 + 1):
        data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        file.write_bytes(data.numpy().tobytes())
        seen.add(digests(run)["model model.safetensors"])
    assert len(seen) == 3


def folder_of(path: Path, before: dict[str, str] | None) -> RunFolder:
    """Return a run folder with a checkpoint of step 2."""
    folder = RunFolder(path / "run")
    save_checkpoint(folder.checkpoints, 2, {}, keep=1, inputs=before)
    (folder.path / "environment.json").write_text('{"python": "3"}')
    return folder


def test_a_run_without_a_change_is_resumed_without_a_word(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr(inputs, "say", said.append)
    now = digests(run)
    require_same_inputs(run, folder_of(tmp_path, now), now, allow_changes=False)
    assert said == []


def _remove_module() -> None:
    Path("rules.py").write_text("def right(text):\n    return 1.0\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda: Path("q.jsonl").write_text('{"question": "1 - 1", "answer": "0"}'),
            r"questions q\.jsonl: changed\n",
        ),
        (
            lambda: Path("mine.py").write_text("def f(problem, text):\n    return 2.0\n"),
            r"task\.reward mine\.py: changed, modified 20\d\d-\d\d-\d\d",
        ),
        (_remove_module, r"task\.reward deep/limits\.py: no longer there\n"),
        (
            lambda: Path("model/tokenizer_config.json").write_text("{}"),
            r"model tokenizer_config\.json: was not there\n",
        ),
    ],
    ids=["questions", "reward", "module", "tokenizer"],
)
def test_a_run_with_other_inputs_is_refused_unless_allowed(
    run: RunConfig, tmp_path: Path, change: Callable[[], object], said: str
):
    folder = folder_of(tmp_path, digests(run))
    change()
    now = digests(run)
    words = f"step-000002, written 20(.|\n)*{said}(.|\n)*step 3 by --allow-changed-inputs"
    with pytest.raises(ChangedInputsError, match=words):
        require_same_inputs(run, folder, now, allow_changes=False)
    for _ in range(2):  # again after an end before the next checkpoint
        require_same_inputs(run, folder, now, allow_changes=True)
    environment = json.loads((folder.path / "environment.json").read_text())
    (line,) = environment["inputs_changed"]
    assert line.startswith("from step 3 on: ")
    assert environment["python"] == "3"


def test_a_checkpoint_without_digests_is_continued_with_a_line(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr(inputs, "say", said.append)
    require_same_inputs(run, folder_of(tmp_path, None), digests(run), allow_changes=False)
    (line,) = said
    assert "step-000002 holds no digests" in line
    assert "was not compared" in line
