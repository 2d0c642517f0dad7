"""Checkpoints that a run resumes from: complete or absent, verified when read, and the same for any
number of processes.

    step-000040/
      state.pt                                            what all processes have in common
      shard-00002-model-00001-of-00003.safetensors        the second process's first file of three:
                                                          rows of masters, moments, generators
      manifest.json                                       step, SHA-256 of each file, inputs

torch.distributed.checkpoint writes and reads the safetensors files. So each process reads the rows
that it needs, whichever processes wrote them, and no file holds a pickle that could execute code.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from qarl.configs.errors import ConfigError, QarlError
from qarl.learner.processes import FailedElsewhereError, Processes
from qarl.report.run_folder import checkpoint_steps

if TYPE_CHECKING:
    from qarl.learner.learner import Learner

_STATE = "state.pt"
_TENSORS = ("masters", "moments", "generators")
"""Entries of the learner's state that are written in parts, by the processes that have them."""
_FILE_BYTES = 1 << 30
"""Approximate size of a process's files. Each is assembled in host memory before it is written."""


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

    Args:
        state: `learner`, a state of `Learner.state_dict`, and other things that all processes have
            in common.
        processes: those that call this together. Each writes its rows of the learner's tensors to
            files of its own in `folder`, which they share.
        inputs: digests of the run's inputs (`qarl.run.inputs`).
    """
    processes = processes or Processes()
    target = folder / f"step-{step:06d}"
    building = folder / f".step-{step:06d}.part"
    learner = dict(state.get("learner", {}))
    tensors = {name: learner.pop(name) for name in _TENSORS if name in learner}
    failure: Exception | None = None
    digests: dict[str, str] = {}
    try:
        processes.run_on_first(lambda: _begin_folder({**state, "learner": learner}, building))
        _write_tensors(tensors, building, processes)
        own = [*building.glob(f"shard-{processes.rank + 1:05d}-*")]
        own += [building / _STATE] if processes.first else []
        digests = {file.name: _sha256(file) for file in own}
    except (OSError, RuntimeError, FailedElsewhereError) as error:
        failure = error
    written = processes.all_gather((digests, None if failure is None else str(failure)))
    reasons = [reason for _, reason in written if reason is not None]
    if not reasons:
        try:
            parts = {name: digest for part, _ in written for name, digest in part.items()}
            manifest = {"step": step, "sha256": parts, "inputs": inputs}
            processes.run_on_first(lambda: _commit(building, target, manifest, keep))
            return target
        except (OSError, RuntimeError, FailedElsewhereError) as error:
            failure = error
    shutil.rmtree(building, ignore_errors=True)
    older = list_checkpoints(folder)
    left = f"the one of {older[-1].name} is as it was" if older else "none was written before it"
    raise CheckpointError(
        f"cannot write checkpoint {str(target)!r}: {failure or reasons[0]}; {left}; free space for"
        " the next"
    ) from failure


def _begin_folder(state: dict[str, Any], folder: Path) -> None:
    """Make the folder anew, and write what all processes have in common."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write(state, folder / _STATE)


def _write_tensors(tensors: dict[str, Any], folder: Path, processes: Processes) -> None:
    """Write this process's rows of nested tensors. All processes call it together.

    Raises the first error of any process in all.
    """
    # not above, because the import takes half a second that no other command should
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    file_of: dict[str, int] = {}
    total = 0
    for name, tensor in _flat(tensors):
        file_of[name] = 1 + total // (_FILE_BYTES * processes.world)
        total += tensor.numel() * tensor.element_size()
    if not file_of:
        return
    writer = HuggingFaceStorageWriter(str(folder), file_of, save_distributed=True)
    try:
        with _quiet():
            save(tensors, storage_writer=writer, no_dist=processes.world == 1)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _flat(
    tensors: Mapping[str, Any],
    prefix: str = "",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield nested tensors, with names joined by dots as in the files."""
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _quiet() -> "warnings.catch_warnings[None]":
    """Return a context without torch's warning that there is a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _write(state: dict[str, Any], file: Path) -> None:
    # in memory first, because torch's own error names a line of its code, not the system's reason
    content = io.BytesIO()
    torch.save(state, content)
    file.write_bytes(content.getbuffer())
    _flush(file)


def _commit(
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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose bytes are those that were written."""

    folder: Path
    step: int
    state: dict[str, Any]
    """The state that was saved, without the learner's tensors."""
    processes: Processes
    """Those that read it together."""

    def learner_state(self, learner: "Learner") -> dict[str, Any]:
        """Read the learner's state, for its `load_state_dict`.

        Each process reads its own rows, masters into the learner's own tensors. It does not matter
        how many processes wrote them. All processes call it together.

        Raises:
            ConfigError: The checkpoint is of other masters.
            CheckpointError: The files are not those of a run.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = HuggingFaceStorageReader(str(self.folder))
        try:
            shapes = _shapes(reader.read_metadata())
        except (SafetensorError, LookupError, ValueError) as error:
            raise _foreign(self.folder, error) from error
        tensors = learner.optimizer.empty_state(shapes)
        try:
            with _quiet():
                load(tensors, storage_reader=reader, no_dist=self.processes.world == 1)
        except CheckpointException as error:
            raise _foreign(self.folder, error) from error
        return {**self.state["learner"], **tensors}


def _shapes(metadata: Any) -> dict[str, Any]:
    """Return the shapes of a learner's tensors, nested as they are.

    metadata: torch.distributed.checkpoint's `Metadata`.
    """
    shapes: dict[str, Any] = {"masters": {}, "moments": {}, "generators": ()}
    sizes = {name: entry.size for name, entry in metadata.state_dict_metadata.items()}
    for full_name, size in sizes.items():
        kind, _, name = full_name.partition(".")
        if kind == "masters":
            shapes["masters"][name] = size
            shapes["moments"].setdefault(name, {})
        elif kind == "moments":
            master, _, key = name.rpartition(".")
            shapes["moments"].setdefault(master, {})[key] = size
        else:
            shapes[kind] = size
    return shapes


def load_checkpoint(
    folder: Path,
    processes: Processes | None = None,
    report: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Return the newest checkpoint in `folder`.

    Args:
        folder: Folder with the checkpoints.
        processes: Those that call this together. Each hashes its share of the files.
        report: If it is given, damaged checkpoints are renamed to `damaged-step-…`, and the newest
            intact one is read; it is called with a line about each of them. Default: the newest
            checkpoint must be intact.

    Raises:
        ConfigError: There is no checkpoint.
        CheckpointError: The bytes are not those that were written.
    """
    processes = processes or Processes()
    # listed once, before any is renamed
    checkpoints = processes.run_on_first(lambda: list_checkpoints(folder))
    if not checkpoints:
        raise ConfigError(
            f"{str(folder)!r} holds no checkpoint yet; start the run again with another --output"
        )
    for index, newest in reversed(list(enumerate(checkpoints))):
        fault = _fault(newest, processes)
        if fault is None:
            if report is not None:
                report(f"going on from checkpoint {newest.name}")
            return _read(newest, processes)
        if report is None or index == 0:
            older = f"remove that folder to go on from {checkpoints[index - 1].name}"
            alone = "no other one is left: start the run again with another --output"
            raise CheckpointError(
                f"checkpoint {str(newest)!r} is damaged ({fault}); {older if index else alone}"
            )
        renamed = newest.with_name(f"damaged-{newest.name}")
        report(f"checkpoint {str(newest)!r} is damaged ({fault}); going on from the one before it")
        processes.run_on_first(lambda old=newest, new=renamed: _rename(old, new))
    raise AssertionError("the oldest checkpoint is read or refused")


def _fault(checkpoint: Path, processes: Processes) -> str | None:
    """Describe what is wrong with a checkpoint's bytes, or return None if they are intact."""
    digests = processes.run_on_first(lambda: _digests(checkpoint))
    if digests is None:
        return "its manifest.json cannot be read"
    names = sorted(digests)
    if any(Path(name).name != name for name in names):
        return f"its manifest.json names files elsewhere, {names[0]!r}"
    # torch reads every safetensors file of a folder, so none may be there that is not hashed
    tensors = processes.run_on_first(
        lambda: {file.name for file in checkpoint.glob("*.safetensors")}
    )
    if unlisted := sorted(tensors - digests.keys()):
        return f"its manifest.json does not name {unlisted[0]}"
    files = {name: checkpoint / name for name in processes.share(names)}
    damaged = processes.concatenated(
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


def _read(checkpoint: Path, processes: Processes) -> Checkpoint:
    manifest = _manifest(checkpoint)
    try:
        step = int(manifest["step"])
        state = torch.load(checkpoint / _STATE, weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        OSError,
        LookupError,
        ValueError,
        TypeError,
    ) as error:
        raise _foreign(checkpoint, error) from error
    return Checkpoint(checkpoint, step, state, processes)


def _foreign(checkpoint: Path, error: BaseException) -> CheckpointError:
    """Return the refusal of a checkpoint whose files are whole, but not a run's."""
    return CheckpointError(
        f"{str(checkpoint)!r} was not written by a run ({type(error).__name__}); take another"
        " copy of it"
    )


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


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
