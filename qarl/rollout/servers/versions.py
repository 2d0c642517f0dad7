"""Files of a weight version: the full version, or a delta from the one before (`quant.delta`).

    version-7/ tensors-0.safetensors …   as many files as it takes at 4 GiB each
               manifest.json             the names in them, in the stream's order, and the digest

    version-8/ delta                     the difference from version 7
               manifest.json             the digests of version 7 and version 8

A folder gets its name only after all files are written, so that a replica reads a complete version
or none.
"""

import json
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field
from safetensors import SafetensorError

from qarl.configs.files import written_aside
from qarl.quant.delta import Count, DeltaError, Digest, VersionCache
from qarl.quant.digest import StreamDigest
from qarl.quant.tensor_files import write_tensors
from qarl.quant.types import LowBitTensor
from qarl.rollout.engine import EngineError

MANIFEST = "manifest.json"
_DELTA = "delta"
_TENSORS = re.compile(r"tensors-\d{1,6}\.safetensors")
MANIFEST_BYTES = 2**26
_BYTES_BESIDES = 2**20
"""Allowance for what files contain besides tensors: names, dtypes, shapes, offsets.

In bytes per version. Each tensor adds 4 KiB.
"""

_BYTES_A_SECOND = 50e6
"""Slowest throughput that we accept from a healthy server, in bytes/s.

It applies to sending, reading, hashing and loading. A server that takes `_SECONDS` longer counts as
hung.
"""
_SECONDS = 30.0


class _Manifest(BaseModel, strict=True, extra="forbid", frozen=True):
    """Contents of `manifest.json`."""

    version: int
    digest: Digest
    """Digest of the stream (`quant.digest`)."""
    bytes: Count
    """Size of the data in the files, in bytes."""
    tensor_bytes: Count
    """Size of the full version's tensors, in bytes."""
    base: Digest | None
    """Digest of the version that a delta starts from; None for a full version."""
    files: dict[str, tuple[Annotated[str, Field(max_length=1024)], ...]]
    """File name → names of its tensors, in order. Empty for a delta."""


class Version(_Manifest, frozen=True):
    """A manifest and the folder of its files."""

    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files, without the manifest."""
        return tuple(self.files) if self.base is None else (_DELTA,)

    @property
    def max_bytes(self) -> int:
        """Upper bound on the total size of these files, in bytes."""
        if self.base is not None:
            return self.bytes
        return self.tensor_bytes + _BYTES_BESIDES + 4096 * sum(map(len, self.files.values()))

    def tensors(self) -> Iterator[LowBitTensor]:
        """Read a full version's stream lazily from its files.

        Raises `ValueError` if the files are not those of a version, or are larger than they may be.
        """
        from safetensors import SafetensorError, safe_open

        limit = self.max_bytes
        for file, names in self.files.items():
            try:
                limit -= _size(self.folder / file, limit)
                with safe_open(self.folder / file, "pt") as tensors:
                    for name in names:
                        yield LowBitTensor(name, tensors.get_tensor(name))
            except (SafetensorError, OSError, RuntimeError) as error:
                raise ValueError(
                    f"{file} of {str(self.folder)!r} cannot be read: {error}"
                ) from error

    def received(self, tensor_bytes: int, cached: VersionCache | None) -> VersionCache:
        """Read the version into host memory, reusing `cached`.

        A delta is applied to `cached`, which then is this version. A full version is written into
        the memory of `cached`. After an error `cached` is unchanged if this is a delta, and invalid
        otherwise.

        Args:
            tensor_bytes: Announced size of the version's tensors.
            cached: The version that is in host memory, or None.

        Raises:
            ValueError: The files are not those of a version, or are larger than announced.
            DeltaError: The delta does not fit `cached`.
        """
        if self.tensor_bytes != tensor_bytes:
            raise ValueError(
                f"{str(self.folder)!r} has {self.tensor_bytes} bytes of tensors, not {tensor_bytes}"
            )
        if self.base is None:
            return VersionCache(self.version, self.tensors(), reuse=cached)
        if cached is None:
            raise DeltaError(
                f"it is from version {self.base}, and none is held here; send the whole version"
            )
        try:
            delta = _read(self.folder / _DELTA, self.bytes)
        except OSError as error:
            raise ValueError(
                f"the delta in {str(self.folder)!r} cannot be read: {error}"
            ) from error
        cached.apply(delta, self.version, self.digest)
        return cached


def write_version(stream: Iterable[LowBitTensor], parent: Path, version: int) -> Version:
    """Write a stream into a folder under `parent`. The folder appears only when it is complete.

    Raises `EngineError` if the disk refuses.
    """

    def write(folder: Path) -> dict[str, object]:
        digest = StreamDigest()
        files = dict(write_tensors(stream, folder, digest))
        sizes = {"bytes": digest.bytes, "tensor_bytes": digest.bytes}
        return {"digest": digest.hexdigest(), **sizes, "base": None, "files": files}

    return _write(parent, version, write)


def write_delta(delta: bytes, parent: Path, version: VersionCache, base: str) -> Version:
    """Write a delta into a folder under `parent`, like `write_version`.

    Args:
        delta: Encoded difference from the base version.
        version: The new version.
        base: Digest of the base version.
    """

    def write(folder: Path) -> dict[str, object]:
        (folder / _DELTA).write_bytes(delta)
        sizes = {"bytes": len(delta), "tensor_bytes": version.bytes}
        return {"digest": version.digest, **sizes, "base": base, "files": {}}

    return _write(parent, version.version, write)


def _write(
    parent: Path,
    version: int,
    write: Callable[[Path], dict[str, object]],
) -> Version:
    """Write a version's folder: the files that `write` makes, and a manifest of what it returns."""
    folder = parent / f"version-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with written_aside(folder) as building:
            building.mkdir(parents=True)
            manifest = {"version": version, **write(building)}
            (building / MANIFEST).write_text(json.dumps(manifest) + "\n")
    # On a full disk safetensors raises its own error, not OSError.
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot write weight version {version} for the servers to {str(parent)!r}: {error};"
            " free space, or give another folder as rollout.server_folder"
        ) from error
    return read_version(folder)


def read_version(folder: Path) -> Version:
    """Read a folder's manifest.

    Raises `ValueError` if it is damaged or names other files than a version's.
    """
    try:
        manifest = _Manifest.model_validate_json(_read(folder / MANIFEST, MANIFEST_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"no weight version can be read in {str(folder)!r}: {error}") from error
    for file in manifest.files:
        if not _TENSORS.fullmatch(file):
            raise ValueError(
                f"the manifest in {str(folder)!r} names {file!r}, which is not a file of a weight"
                " version"
            )
    return Version(folder=folder, **dict(manifest))


def _read(file: Path, limit: int) -> bytes:
    _size(file, limit)
    return file.read_bytes()


def _size(file: Path, limit: int) -> int:
    """Return the size of a plain file in bytes.

    Raises `ValueError` for links, pipes and devices, and for files of more than `limit` bytes.
    """
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{str(file)!r} is not a plain file")
    if status.st_size > limit:
        raise ValueError(
            f"{str(file)!r} has {status.st_size} bytes, more than the {limit} that it may have"
        )
    return status.st_size


def remove_versions(parent: Path, but: int | None = None) -> None:
    """Remove the versions under `parent`, except number `but`."""
    for folder in parent.glob("version-*"):
        if folder.name != f"version-{but}":
            shutil.rmtree(folder, ignore_errors=True)


def publish_timeout(tensor_bytes: int) -> float:
    """Return how many seconds a server may take to receive, read or load a version of this size."""
    return _SECONDS + tensor_bytes / _BYTES_A_SECOND
