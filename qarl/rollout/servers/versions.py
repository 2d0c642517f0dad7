"""A weight version as files that every replica reads: whole, or its difference from the one before
(`quant.delta`).

    version-7/ tensors-0.safetensors …     as many as it takes at 4 GiB each
               manifest.json               what is in them, in the order of the stream, and its
               digest

    version-8/ delta                       from version 7
               manifest.json               the digests of version 7 and version 8

The folder gets its name when all of it is written: a replica reads a whole version or none.
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
"""What files may have besides a version's tensors, and 4 KiB a tensor: names, dtypes, shapes,
offsets.
"""

_BYTES_A_SECOND = 50e6
"""That a server gets, reads, hashes and loads at the least; with `_SECONDS` more it is taken to
hang.
"""
_SECONDS = 30.0


class _Manifest(BaseModel, strict=True, extra="forbid", frozen=True):
    """digest: of the stream (`quant.digest`). bytes: of what is in the files. tensor_bytes: of the
    whole version. base: the digest of the version that a delta is from; None for a whole one.
    files: of a whole one, name → the tensors in it, in order.
    """

    version: int
    digest: Digest
    bytes: Count
    tensor_bytes: Count
    base: Digest | None
    files: dict[str, tuple[Annotated[str, Field(max_length=1024)], ...]]


class Version(_Manifest, frozen=True):
    """What a manifest says, and the folder of its files."""

    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Of its files besides the manifest."""
        return tuple(self.files) if self.base is None else (_DELTA,)

    @property
    def most_bytes(self) -> int:
        """That those may have, all together."""
        if self.base is not None:
            return self.bytes
        return self.tensor_bytes + _BYTES_BESIDES + 4096 * sum(map(len, self.files.values()))

    def tensors(self) -> Iterator[LowBitTensor]:
        """The stream that was written whole, read from the files as it is asked for. Raises
        `ValueError` for files that are none of a version, or hold more than it.
        """
        from safetensors import SafetensorError, safe_open

        limit = self.most_bytes
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
        """The version in host memory: made of `cached` where this is a delta, which is this version
        then, and in its memory where this is whole.

        tensor_bytes: of the version that was announced. Raises `ValueError` for files that are none
        of a version or hold more than that, `DeltaError` where a delta does not fit; `cached` is
        what it was then, unless this is whole.
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
    """Write a stream into a folder under `parent`, complete or not there. `EngineError` where the
    disk refuses.
    """

    def write(folder: Path) -> dict[str, object]:
        digest = StreamDigest()
        files = dict(write_tensors(stream, folder, digest))
        sizes = {"bytes": digest.bytes, "tensor_bytes": digest.bytes}
        return {"digest": digest.hexdigest(), **sizes, "base": None, "files": files}

    return _write(parent, version, write)


def write_delta(delta: bytes, parent: Path, version: VersionCache, base: str) -> Version:
    """As `write_version`, what makes `version` of the one of digest `base`."""

    def write(folder: Path) -> dict[str, object]:
        (folder / _DELTA).write_bytes(delta)
        sizes = {"bytes": len(delta), "tensor_bytes": version.bytes}
        return {"digest": version.digest, **sizes, "base": base, "files": {}}

    return _write(parent, version.version, write)


def _write(parent: Path, version: int, write: Callable[[Path], dict[str, object]]) -> Version:
    """The folder whose files `write` makes, and its manifest with what that returns."""
    folder = parent / f"version-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with written_aside(folder) as building:
            building.mkdir(parents=True)
            manifest = {"version": version, **write(building)}
            (building / MANIFEST).write_text(json.dumps(manifest) + "\n")
    # safetensors' own is what a full disk raises while it writes
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot write weight version {version} for the servers to {str(parent)!r}: {error};"
            " free space, or give another folder as rollout.server_folder"
        ) from error
    return read_version(folder)


def read_version(folder: Path) -> Version:
    """What a folder's manifest says. Raises `ValueError` where it is damaged, or names files
    elsewhere.
    """
    try:
        manifest = _Manifest.model_validate_json(_read(folder / MANIFEST, MANIFEST_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"no weight version can be read in {str(folder)!r}: {error}") from error
    for file in manifest.files:
        if not _TENSORS.fullmatch(file):
            raise ValueError(
                f"the manifest in {str(folder)!r} names {file!r}, which is no file of a weight"
                " version"
            )
    return Version(folder=folder, **dict(manifest))


def _read(file: Path, most: int) -> bytes:
    _size(file, most)
    return file.read_bytes()


def _size(file: Path, most: int) -> int:
    """Of a plain file, in bytes. Raises `ValueError` for links, pipes and devices, and for more
    bytes than that.
    """
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{str(file)!r} is no plain file")
    if status.st_size > most:
        raise ValueError(
            f"{str(file)!r} has {status.st_size} bytes, more than the {most} that it may have"
        )
    return status.st_size


def remove_versions(parent: Path, but: int | None = None) -> None:
    """Remove the versions under `parent`, but for one that is to stay."""
    for folder in parent.glob("version-*"):
        if folder.name != f"version-{but}":
            shutil.rmtree(folder, ignore_errors=True)


def seconds_of(tensor_bytes: int) -> float:
    """That a server may take to get, to read, or to load, a version of so many bytes."""
    return _SECONDS + tensor_bytes / _BYTES_A_SECOND
