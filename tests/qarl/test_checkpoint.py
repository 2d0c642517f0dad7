"""Checkpoints and metrics files: complete or absent, damage is noticed, resuming drops what came
after.
"""

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from qarl.configs.errors import ConfigError
from qarl.quant.types import LowBitTensor
from qarl.report.metrics import _drop_after
from qarl.report.run_folder import read_metrics
from qarl.run import checkpoint
from qarl.run.checkpoint import (
    CheckpointError,
    intact_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from qarl.sync.export import ExportError, write_checkpoint


def test_newest_are_kept_and_read_back(tmp_path: Path):
    for step in range(1, 5):
        save_checkpoint(tmp_path, step, {"x": torch.arange(step)}, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "step-000003",
        "step-000004",
    ]
    newest = load_checkpoint(tmp_path)
    assert newest.step == 4
    assert torch.equal(newest.state["x"], torch.arange(4))


@contextmanager
def small_files() -> Iterator[None]:
    """Limit files to 100 kB, as an operating system with a quota does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_size_limit_leaves_the_old_checkpoint_and_no_part_of_an_export(
    tmp_path: Path,
):
    """Contract: an export says why, though safetensors' error is no `OSError`, and frees what it
    wrote.
    """
    save_checkpoint(tmp_path, 1, {"x": torch.ones(10)}, keep=1)
    with (
        small_files(),
        pytest.raises(CheckpointError, match=r"step-000002.*the one of step-000001 is as it was"),
    ):
        save_checkpoint(tmp_path, 2, {"x": torch.ones(1_000_000)}, keep=1)
    masters = {"learner": {"masters": {"a": torch.ones(1_000_000)}}}
    with small_files(), pytest.raises(CheckpointError, match=r"step-000002.*File too large"):
        save_checkpoint(tmp_path, 2, masters, keep=1)
    stream = [LowBitTensor(name, torch.ones(1_000_000)) for name in ("a.weight", "b.weight")]
    with (
        small_files(),
        pytest.raises(ExportError, match=r"cannot write checkpoint '.*export': .*File too large"),
    ):
        write_checkpoint(stream, {}, tmp_path, tmp_path / "export")
    assert load_checkpoint(tmp_path).step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_first_checkpoint_that_fails_claims_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    )
    with pytest.raises(CheckpointError, match=r"No space left.*; none was written before it"):
        save_checkpoint(tmp_path, 1, {"x": torch.zeros(3)}, keep=1)
    assert intact_checkpoint(tmp_path) is None


def test_a_failed_write_quotes_the_operating_system(tmp_path: Path):
    """torch's own error speaks of a line of its code."""
    with pytest.raises(OSError, match="No space left"):
        checkpoint._write({"x": torch.ones(10**6)}, Path("/dev/full"))


@pytest.mark.parametrize("damage", ["bytes", "manifest", "elsewhere"])
def test_a_damaged_newest_checkpoint_is_stepped_over(tmp_path: Path, damage: str):
    """Contract: with a warning, and set aside so that it neither counts as one of those kept nor is
    tried again.
    """
    for step in (1, 2):
        save_checkpoint(
            tmp_path,
            step,
            {"x": torch.full((3,), step)},
            keep=2,
        )
    file = tmp_path / "step-000002" / ("state.pt" if damage == "bytes" else "manifest.json")
    if damage == "elsewhere":  # a file outside, whose digest is right
        manifest = json.loads(file.read_text())
        (digest,) = manifest["sha256"].values()
        file.write_text(json.dumps({**manifest, "sha256": {"../step-000002/state.pt": digest}}))
    else:
        file.write_bytes(b"{" if damage == "manifest" else file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(
        CheckpointError,
        match=r"step-000002.*is damaged.*remove that folder to go on from step-000001",
    ):
        load_checkpoint(tmp_path)
    assert intact_checkpoint(tmp_path) == tmp_path / "step-000001"
    said: list[str] = []
    assert load_checkpoint(tmp_path, report=said.append).step == 1
    assert ["step-000002" in said[0], said[1:]] == [
        True,
        ["going on from checkpoint step-000001"],
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "damaged-step-000002",
        "step-000001",
    ]
    (tmp_path / "step-000001" / "state.pt").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"is damaged.*no other one is left"):
        load_checkpoint(tmp_path, report=said.append)


def test_a_safetensors_file_without_a_digest_is_damage(tmp_path: Path):
    """Contract: no tensor is read whose bytes were not compared with the manifest."""
    folder = save_checkpoint(
        tmp_path,
        2,
        {"learner": {"masters": {"a": torch.ones(3)}}},
        keep=1,
    )
    assert intact_checkpoint(tmp_path) == folder
    (listed,) = folder.glob("*.safetensors")
    shutil.copy(listed, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"does not name other\.safetensors"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("what", ["pickle", "text", "step"])
def test_foreign_checkpoint_files_are_refused_by_name(tmp_path: Path, what: str):
    """Files of other makers with the right SHA-256: nothing of theirs is executed, and a line says
    so.
    """
    folder = save_checkpoint(tmp_path, 2, {"x": torch.ones(3)}, keep=1)
    if what == "pickle":
        torch.save({"x": Path("x")}, folder / "state.pt")
    elif what == "text":
        (folder / "state.pt").write_text("no archive")
    digests = {"state.pt": sha256((folder / "state.pt").read_bytes()).hexdigest()}
    step = {} if what == "step" else {"step": 2}
    (folder / "manifest.json").write_text(json.dumps({**step, "sha256": digests}))
    with pytest.raises(
        CheckpointError,
        match=r"step-000002' was not written by a run.*take another copy",
    ):
        load_checkpoint(tmp_path)


def test_copies_and_unfinished_writes_are_no_checkpoints(tmp_path: Path):
    """Contract: neither a copy under another name nor an unfinished write is a checkpoint."""
    (tmp_path / ".step-000003.part").mkdir()
    save_checkpoint(tmp_path, 2, {"x": torch.ones(3)}, keep=1).rename(tmp_path / "step-000002.bak")
    with pytest.raises(ConfigError, match="holds no checkpoint yet"):
        load_checkpoint(tmp_path)


def test_lines_after_the_checkpoint_are_dropped(tmp_path: Path):
    """One cut short too. Lines end at line feeds alone: texts may hold U+2028, U+2029 or U+0085,
    which JSON leaves.
    """
    file = tmp_path / "metrics.jsonl"
    text = [
        json.dumps({"step": s, "text": "a\u2028b\u2029c\u0085d"}, ensure_ascii=False)
        for s in (1, 2, 3)
    ]
    file.write_text("".join(line + "\n" for line in text) + '{"step": 4, "rew', encoding="utf-8")
    _drop_after(file, 2)
    assert [line["step"] for line in read_metrics(file)] == [1, 2]
    assert read_metrics(file)[0]["text"] == "a\u2028b\u2029c\u0085d"
