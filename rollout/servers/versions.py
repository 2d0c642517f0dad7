"""A weight version as files that every replica reads: whole, or its difference from the one before (`quant.delta`).

    version-7/ tensors-0.safetensors …     as many as it takes at 4 GiB each
               manifest.json               what is in them, in the order of the stream, and its digest

    version-8/ delta                       from version 7
               manifest.json               the digests of version 7 and version 8

The folder gets its name when all of it is written: a replica reads a whole version or none.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quant.delta import HeldVersion
from quant.digest import StreamDigest
from quant.types import LowBitTensor
from rollout.engine import EngineError

_FILE_BYTES = 4 * 2**30
_MANIFEST = "manifest.json"
_DELTA = "delta"


@dataclass(frozen=True)
class Version:
    """folder: of the files. digest: of the stream (`quant.digest`). bytes: of what is in the files. tensor_bytes: of
    the whole version. base: the digest of the version that a delta is from; None for a whole one. files: of a whole
    one, name → the tensors in it, in order.
    """

    folder: Path
    version: int
    digest: str
    bytes: int
    tensor_bytes: int
    base: str | None
    files: dict[str, tuple[str, ...]]

    def tensors(self) -> Iterator[LowBitTensor]:
        """The stream that was written whole, read from the files as it is asked for."""
        from safetensors import safe_open

        for file, names in self.files.items():
            with safe_open(self.folder / file, "pt") as tensors:
                for name in names:
                    yield LowBitTensor(name, tensors.get_tensor(name))


def write_version(stream: Iterable[LowBitTensor], parent: Path, version: int) -> Version:
    """Write a stream whole into a folder under `parent`, which is complete or not there. Raises `EngineError` where the
    disk refuses."""

    def write(folder: Path) -> dict[str, object]:
        digest = StreamDigest()
        files = dict(_write_files(stream, folder, digest))
        sizes = {"bytes": digest.bytes, "tensor_bytes": digest.bytes}
        return {"digest": digest.hexdigest(), **sizes, "base": None, "files": files}

    return _write(parent, version, write)


def write_delta(delta: bytes, parent: Path, version: HeldVersion, base: str) -> Version:
    """As `write_version`, what makes `version` of the one of digest `base`."""

    def write(folder: Path) -> dict[str, object]:
        (folder / _DELTA).write_bytes(delta)
        sizes = {"bytes": len(delta), "tensor_bytes": version.bytes}
        return {"digest": version.digest, **sizes, "base": base, "files": {}}

    return _write(parent, version.version, write)


def _write(parent: Path, version: int, write: Callable[[Path], dict[str, object]]) -> Version:
    """The folder whose files `write` makes, and its manifest with what that returns."""
    folder = parent / f"version-{version}"
    building = folder.with_name(f"{folder.name}.part")
    try:
        for leftover in (building, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir(parents=True)
        manifest = {"version": version, **write(building)}
        (building / _MANIFEST).write_text(json.dumps(manifest) + "\n")
        os.replace(building, folder)
    except Exception as error:  # of the disk by way of safetensors too, which has errors of its own
        shutil.rmtree(building, ignore_errors=True)
        raise EngineError(
            f"cannot write weight version {version} for the servers to {str(parent)!r}: {error}; free space, or give "
            "another folder as rollout.server_folder"
        ) from error
    return read_version(folder)


def read_version(folder: Path) -> Version:
    """What a folder's manifest says. Raises `ValueError` where it is damaged, or names files elsewhere."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = {str(file): tuple(map(str, names)) for file, names in manifest["files"].items()}
        version = Version(
            folder=folder,
            version=int(manifest["version"]),
            digest=str(manifest["digest"]),
            bytes=int(manifest["bytes"]),
            tensor_bytes=int(manifest["tensor_bytes"]),
            base=None if manifest["base"] is None else str(manifest["base"]),
            files=files,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no weight version can be read in {str(folder)!r}: {error}") from error
    outside = [file for file in files if Path(file).name != file]
    if outside:
        raise ValueError(f"the manifest in {str(folder)!r} names {outside[0]!r}, which is no file of that folder")
    return version


def read_delta(version: Version) -> bytes:
    """From the version of digest `version.base` to this one. Raises `OSError` where it cannot be read."""
    return (version.folder / _DELTA).read_bytes()


def remove_versions(parent: Path, but: int | None = None) -> None:
    """Remove the versions under `parent`, but for one that is to stay."""
    for folder in parent.glob("version-*"):
        if folder.name != f"version-{but}":
            shutil.rmtree(folder, ignore_errors=True)


def _write_files(stream: Iterable[LowBitTensor], folder: Path, digest: StreamDigest) -> Iterator[tuple[str, list[str]]]:
    from safetensors.torch import save_file

    pending: dict[str, object] = {}
    size = written = 0

    def flush() -> tuple[str, list[str]]:
        file = folder / f"tensors-{written}.safetensors"
        save_file(pending, file)  # type: ignore[arg-type]
        file.chmod(0o644)  # safetensors writes for the owner alone, and servers may run under other users
        names = list(pending)
        pending.clear()
        return file.name, names

    for item in stream:
        digest.update(item)
        pending[item.name] = item.tensor.detach().contiguous()
        size += item.tensor.nbytes
        if size >= _FILE_BYTES:
            yield flush()
            size, written = 0, written + 1
    if pending:
        yield flush()
