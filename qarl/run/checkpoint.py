"""Checkpoints to resume from: complete or absent, checked on reading, the same for any number of processes."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from configs.errors import ConfigError, QarlError
from learner.processes import FailedElsewhereError, Processes


class CheckpointError(QarlError):
    """A checkpoint that could not be written or does not read back."""

    heading = "checkpoint"


def save_checkpoint(
    folder: Path, step: int, state: dict[str, Any], keep: int, processes: Processes | None = None
) -> Path:
    """Write `state` as folder/step-NNNNNN, then drop all but the newest `keep`.

    processes: those that call this together, each with its part of the learner's state, which it writes to a file of
    its own; `folder` is one they share. The files are flushed to disk before the folder gets its name, so a crash, a
    process that dies or a full disk leaves the older checkpoints as they were. Raises `CheckpointError` where the disk
    refuses any of them.
    """
    together = processes or Processes()
    target = folder / f"step-{step:06d}"
    building = folder / f".step-{step:06d}.part"
    file = building / f"state-{together.rank:05d}.pt"
    failure: Exception | None = None
    try:
        together.first_does(lambda: _make_anew(building))
        _write(state, file)
    except (OSError, RuntimeError, FailedElsewhereError) as error:
        failure = error
    written = together.gathered((file.name, _sha256(file) if failure is None else None, str(failure)))
    if all(digest for _, digest, _ in written):
        try:
            manifest = {"step": step, "sha256": {name: digest for name, digest, _ in written}}
            together.first_does(lambda: _name(building, target, manifest, keep))
            return target
        except (OSError, RuntimeError, FailedElsewhereError) as error:
            failure = error
    shutil.rmtree(building, ignore_errors=True)
    reason = failure or next(told for _, digest, told in written if not digest)
    raise CheckpointError(
        f"cannot write checkpoint {str(target)!r}: {reason}; older checkpoints are intact, free space and --resume"
    ) from failure


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write(state: dict[str, Any], file: Path) -> None:
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _name(building: Path, target: Path, manifest: dict[str, Any], keep: int) -> None:
    """Let a complete checkpoint have its name, and drop the oldest."""
    (building / "manifest.json").write_text(json.dumps(manifest) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(building, target)
    for old in list_checkpoints(target.parent)[:-keep]:
        shutil.rmtree(old)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / "manifest.json").is_file())


def load_checkpoint(folder: Path, processes: Processes | None = None) -> tuple[int, dict[str, Any]]:
    """Step and whole state of the newest checkpoint in `folder`, however many processes wrote it. Tensors are mapped
    from the files, and so take memory as they are read.

    processes: those that call this together; each hashes its share of the files, and all of them map all.
    Raises `ConfigError` where there is none, `CheckpointError` where its bytes are not those that were written.
    """
    found = list_checkpoints(folder)
    if not found:
        raise ConfigError(f"{str(folder)!r} holds no checkpoint yet; start the run again with another --output")
    newest = found[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    together, names = processes or Processes(), sorted(manifest["sha256"])
    damaged = together.concatenated(
        [name for name in together.share(names) if not _intact(newest / name, manifest["sha256"][name])]
    )
    if damaged:
        raise CheckpointError(
            f"checkpoint {str(newest)!r} is damaged (the SHA-256 of {damaged[0]} differs from its manifest); remove "
            "that folder to resume from the one before it"
        )
    parts = [torch.load(newest / name, weights_only=True, mmap=True) for name in names]
    if len(parts) == 1:
        return manifest["step"], parts[0]
    return manifest["step"], {**parts[0], "learner": merge_states([part["learner"] for part in parts])}


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The learner states of all processes as one: masters and moments of all, the rest as the first has it."""
    whole = dict(states[0])
    whole["masters"] = {name: tensor for state in states for name, tensor in state["masters"].items()}
    steps = {name: step for state in states for name, step in state["optimizer"]["masters"].items()}
    whole["optimizer"] = {**states[0]["optimizer"], "masters": steps}
    return whole


def _intact(file: Path, digest: str) -> bool:
    return file.is_file() and _sha256(file) == digest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
