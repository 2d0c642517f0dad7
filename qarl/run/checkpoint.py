"""Checkpoints that a run resumes from: complete or absent, verified when read, and the same for any
number of processes.
"""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch

from qarl.configs.errors import ConfigError, QarlError
from qarl.learner.processes import FailedElsewhereError, Processes
from qarl.report.run_folder import checkpoint_steps


class CheckpointError(QarlError, heading="checkpoint"):
    """A checkpoint that could not be written or does not read back."""


def save_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, Any],
    keep: int,
    processes: Processes | None = None,
    inputs: dict[str, str] | None = None,
) -> Path:
    """Write `state` as folder/step-NNNNNN, then drop all but the newest `keep` checkpoints.

    The files are flushed to disk before the folder gets its name. So a crash, a process that dies
    or a full disk leaves the older checkpoints as they were. Raises `CheckpointError` if the disk
    refuses any of the files.

    processes: those that call this together. Each writes its part of the learner's state to its own
    file in `folder`, which they share. inputs: digests of the run's inputs (`qarl.run.inputs`).
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
    written = together.gathered(
        (file.name, _sha256(file) if failure is None else None, str(failure))
    )
    if all(digest for _, digest, _ in written):
        try:
            manifest = {
                "step": step,
                "sha256": {name: digest for name, digest, _ in written},
                "inputs": inputs,
            }
            together.first_does(lambda: _name(building, target, manifest, keep))
            return target
        except (OSError, RuntimeError, FailedElsewhereError) as error:
            failure = error
    shutil.rmtree(building, ignore_errors=True)
    reason = failure or next(message for _, digest, message in written if not digest)
    older = list_checkpoints(folder)
    left = f"the one of {older[-1].name} is as it was" if older else "none was written before it"
    raise CheckpointError(
        f"cannot write checkpoint {str(target)!r}: {reason}; {left}; free space for the next"
    ) from failure


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write(state: dict[str, Any], file: Path) -> None:
    with file.open("wb") as stream:
        recorded = _Recorded(stream)
        try:
            torch.save(state, cast(IO[bytes], recorded))
        # torch's error names the place in its code, not the system's reason
        except RuntimeError as error:
            raise recorded.refusal or error from error
    _flush(file)


class _Recorded:
    """Writable file that remembers the error with which the system refused a write."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self.refusal: OSError | None = None

    def write(self, data: Any) -> int:
        """Write to the file, and record an error."""
        try:
            return self._stream.write(data)
        except OSError as error:
            self.refusal = error
            raise

    def flush(self) -> None:
        """Flush the file."""
        self._stream.flush()


def _name(
    building: Path,
    target: Path,
    manifest: dict[str, Any],
    keep: int,
) -> None:
    """Give a complete checkpoint its name. Once both are on the disk, drop the oldest ones."""
    (building / "manifest.json").write_text(json.dumps(manifest) + "\n")
    _flush(building / "manifest.json")
    _flush(building)
    _rename(building, target)
    _flush(target.parent)
    for old in list_checkpoints(target.parent)[:-keep]:
        shutil.rmtree(old)


def _flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [folder / f"step-{step:06d}" for step in checkpoint_steps(folder)]


def load_checkpoint(
    folder: Path,
    processes: Processes | None = None,
    step_over: Callable[[str], None] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Return step and full state of the newest checkpoint in `folder`.

    It does not matter how many processes wrote it. Tensors are mapped from the files, so they take
    memory only as they are read.

    Args:
        folder: Folder with the checkpoints.
        processes: Those that call this together. Each hashes its share of the files, and all map
            all files.
        step_over: Called with a line about every damaged checkpoint, which is renamed to
            `damaged-step-…` before an older one is tried, and about the one that is read. Default:
            the newest checkpoint must be intact.

    Raises:
        ConfigError: There is no checkpoint.
        CheckpointError: The bytes are not those that were written.
    """
    together = processes or Processes()
    # listed once, before any is renamed
    checkpoints = together.first_does(lambda: list_checkpoints(folder))
    if not checkpoints:
        raise ConfigError(
            f"{str(folder)!r} holds no checkpoint yet; start the run again with another --output"
        )
    for index, newest in reversed(list(enumerate(checkpoints))):
        fault = _fault(newest, together)
        if fault is None:
            (step_over or str)(f"going on from checkpoint {newest.name}")
            return _read(newest)
        if step_over is None or index == 0:
            older = f"remove that folder to go on from {checkpoints[index - 1].name}"
            alone = "no other one is left: start the run again with another --output"
            raise CheckpointError(
                f"checkpoint {str(newest)!r} is damaged ({fault}); {older if index else alone}"
            )
        renamed = newest.with_name(f"damaged-{newest.name}")
        step_over(
            f"checkpoint {str(newest)!r} is damaged ({fault}); going on from the one before it"
        )
        together.first_does(lambda old=newest, new=renamed: _rename(old, new))
    raise AssertionError("the oldest checkpoint is read or refused")


def _fault(checkpoint: Path, together: Processes) -> str | None:
    """Describe what is wrong with a checkpoint's bytes, or return None if they are intact."""
    digests = together.first_does(lambda: _digests(checkpoint))
    if digests is None:
        return "its manifest.json cannot be read"
    names = sorted(digests)
    if any(Path(name).name != name for name in names):
        return f"its manifest.json names files elsewhere, {names[0]!r}"
    files = {name: checkpoint / name for name in together.share(names)}
    damaged = together.concatenated(
        [
            name
            for name, file in files.items()
            if not file.is_file() or _sha256(file) != digests[name]
        ]
    )
    return f"the SHA-256 of {damaged[0]} differs from its manifest" if damaged else None


def _digests(checkpoint: Path) -> dict[str, str] | None:
    """Return the SHA-256 of a checkpoint's files by name, or None if its manifest has none."""
    try:
        return dict(_manifest(checkpoint)["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def intact_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose bytes are intact, or None if there is none."""
    intact = (
        each for each in reversed(list_checkpoints(folder)) if _fault(each, Processes()) is None
    )
    return next(intact, None)


def _read(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    manifest = _manifest(checkpoint)
    try:
        step = int(manifest["step"])
        parts = [
            torch.load(checkpoint / name, weights_only=True, mmap=True)
            for name in sorted(manifest["sha256"])
        ]
    except (
        pickle.UnpicklingError,
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
    ) as error:
        raise CheckpointError(
            f"{str(checkpoint)!r} was not written by a run ({type(error).__name__}); take another"
            " copy of it"
        ) from error
    if len(parts) == 1:
        return step, parts[0]
    return step, {
        **parts[0],
        "learner": merge_states([part["learner"] for part in parts]),
    }


def checkpoint_inputs(checkpoint: Path) -> dict[str, str] | None:
    """Return the digests of the inputs that a checkpoint's run had, or None if it holds none."""
    try:
        return _manifest(checkpoint).get("inputs")
    except (OSError, ValueError, AttributeError):  # a damaged checkpoint
        return None


def _manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())


def _rename(old: Path, new: Path) -> None:
    shutil.rmtree(new, ignore_errors=True)
    os.replace(old, new)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the processes' learner states: masters and moments of all, the rest of the first."""
    merged = dict(states[0])
    merged["masters"] = {
        name: tensor for state in states for name, tensor in state["masters"].items()
    }
    steps = {name: step for state in states for name, step in state["optimizer"]["masters"].items()}
    merged["optimizer"] = {**states[0]["optimizer"], "masters": steps}
    return merged


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
