"""Checkpoints to resume from: complete or absent, checked on reading."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from qarl.config import ConfigError


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or does not read back."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as folder/step-NNNNNN, then drop all but the newest `keep`.

    The files are flushed to disk before the folder gets its name, so a crash or a full disk leaves the older
    checkpoints as they were. Raises `CheckpointError` where the disk refuses.
    """
    target = folder / f"step-{step:06d}"
    building = folder / f".step-{step:06d}.part"
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        with (building / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        manifest = {"step": step, "sha256": _sha256(building / "state.pt")}
        (building / "manifest.json").write_text(json.dumps(manifest) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(building, target)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {str(target)!r}: {error}; older checkpoints are intact, free space and --resume"
        ) from error
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / "manifest.json").is_file())


def load_checkpoint(folder: Path) -> tuple[int, dict[str, Any]]:
    """Step and state of the newest checkpoint in `folder`.

    Raises `ConfigError` where there is none, `CheckpointError` where its bytes are not those that were written.
    """
    found = list_checkpoints(folder)
    if not found:
        raise ConfigError(f"{str(folder)!r} holds no checkpoint yet; start the run again with another --output")
    newest = found[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    if _sha256(newest / "state.pt") != manifest["sha256"]:
        raise CheckpointError(
            f"checkpoint {str(newest)!r} is damaged (its SHA-256 differs from its manifest); remove that folder to "
            "resume from the one before it"
        )
    return manifest["step"], torch.load(newest / "state.pt", weights_only=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The learner states of all processes as one: masters and moments of all, the rest as the first has it."""
    whole = dict(states[0])
    whole["masters"] = {name: tensor for state in states for name, tensor in state["masters"].items()}
    steps = {name: step for state in states for name, step in state["optimizer"]["masters"].items()}
    whole["optimizer"] = {**states[0]["optimizer"], "masters": steps}
    return whole
