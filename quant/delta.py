"""A weight version as its difference from the one before: which bytes of the packed tensors changed, and how.

A step at a learning rate of 1e-6 changes one packed byte in thousands, so a delta is a hundredth of the version and
smaller (docs/publish.md). Both ends hold the version before in host memory (`HeldVersion`). A delta names the digest of
the version it is from and that of the version it makes, and is applied whole or not at all: what is truncated, altered
or meant for another version is refused with `DeltaError`, and nothing has changed. The digests are those of a stream
(`quant.digest`): proof against faults. Who may announce a version, the transport has to know.

Layout, integers little-endian:

    b"qarl-dlt" | bytes of the header, uint32 | header, JSON (`_Header`) | payloads of its tensors, one after the other

Only tensors that changed are listed. Where N of a tensor's bytes changed, few of them, its payload is five planes of N
bytes, compressed together by zstd: the four bytes, lowest first, of each one's distance to the changed byte before,
less one (uint32), then the XOR of each one's values. Otherwise it is the tensor's bytes.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.errors import QarlError
from quant.digest import digest_of_parts, tensor_part
from quant.types import LowBitTensor

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"qarl-dlt"
_START = struct.Struct("<8sI")
_PLANES = 5
_LARGEST_GAP = (1 << 32) - 1
_CHUNK = 1 << 18
"""Bytes compared at a time: both sides and their XOR stay in a core's cache."""

_FEWEST_BYTES_A_CHANGE = 8
"""A tensor with more changes than one in so many bytes is sent whole. It also bounds what a delta can make a receiver
allocate: for the positions of all changes, as many bytes as it holds already."""

_HEADER_BYTES_A_TENSOR = 2048
"""At most, names of 1,024 characters included."""

_ZSTD = pyarrow.Codec("zstd", compression_level=1)

_Count = Annotated[int, Field(ge=0)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class DeltaError(QarlError):
    """A delta that is damaged, or not from the version that is held; nothing was changed."""

    heading = "delta"


class _Entry(BaseModel):
    """One changed tensor. changes: how many of its bytes are listed, None where it is sent whole. size: of the
    payload, in bytes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(max_length=1024)]
    dtype: Annotated[str, Field(max_length=32)]
    shape: tuple[int, ...]
    changes: _Count | None
    size: _Count


class _Header(BaseModel):
    """version: that the delta makes, of this digest. base, base_digest: the version it is from."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: int
    digest: _Digest
    base: int
    base_digest: _Digest
    tensors: tuple[_Entry, ...]


@dataclass(frozen=True)
class _Change:
    """of one tensor's bytes. positions: int64 [N], rising, None: all. values: uint8 [N], XORs, or new bytes of all."""

    positions: npt.NDArray[np.int64] | None
    values: Bytes

    def apply(self, held: Bytes) -> "_Change":
        """Change `held` in place; returns the change that undoes it."""
        if self.positions is None:
            before = held.copy()
            held[:] = self.values
            return _Change(None, before)
        held[self.positions] ^= self.values
        return self


class HeldVersion:
    """One weight version in host memory: what deltas are made from and applied to. Copies `stream`.

    version: its number. digest: of its stream. bytes: of all its tensors.
    """

    def __init__(self, version: int, stream: Iterable[LowBitTensor]):
        self.version = version
        self._tensors = {i.name: i.tensor.detach().to("cpu", copy=True).contiguous() for i in stream}
        self._parts = {name: tensor_part(LowBitTensor(name, tensor)) for name, tensor in self._tensors.items()}
        self.bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def digest(self) -> str:
        """32 hex digits."""
        return digest_of_parts(self._parts.values())

    def tensors(self) -> Iterator[LowBitTensor]:
        """The held stream, in its order, nothing copied: later versions are written over it."""
        return (LowBitTensor(name, tensor) for name, tensor in self._tensors.items())

    def advance(self, version: int, stream: Iterable[LowBitTensor]) -> bytes:
        """Hold `stream`, of the same tensors, as `version`; returns the delta that does so elsewhere.

        It is no larger than the version itself by more than its header.
        """
        base, base_digest = self.version, self.digest
        entries, payloads = [], []
        for item, (name, held) in zip(stream, self._tensors.items(), strict=True):
            new = item.tensor.detach().cpu().contiguous()
            assert (item.name, new.dtype, new.shape) == (name, held.dtype, held.shape), f"{item.name!r} is not {name!r}"
            change = _difference(_bytes(held), _bytes(new))
            if change is None:
                continue
            change.apply(_bytes(held))
            self._parts[name] = tensor_part(LowBitTensor(name, held))
            payload = _encoded(change)
            count = None if change.positions is None else len(change.positions)
            dtype = str(held.dtype).removeprefix("torch.")
            entries.append(_Entry(name=name, dtype=dtype, shape=tuple(held.shape), changes=count, size=len(payload)))
            payloads.append(payload)
        self.version = version
        header = _Header(
            version=version, digest=self.digest, base=base, base_digest=base_digest, tensors=tuple(entries)
        )
        encoded = header.model_dump_json().encode()
        return b"".join([_START.pack(_MAGIC, len(encoded)), encoded, *payloads])

    def apply(self, delta: bytes | memoryview, version: int, digest: str) -> tuple[str, ...]:
        """Become the version that `delta` makes; returns the names of the tensors that changed.

        version, digest: what the sender announced it to make. Raises `DeltaError`, and is what it was, where it is
        damaged, from another version than is held, or makes another than was announced.
        """
        header, payloads = _read(delta, _HEADER_BYTES_A_TENSOR * (1 + len(self._tensors)))
        if (header.base, header.base_digest) != (self.version, self.digest):
            raise DeltaError(
                f"it is from version {header.base} ({header.base_digest[:16]}…), and version {self.version} "
                f"({self.digest[:16]}…) is held here; send the whole version"
            )
        if (header.version, header.digest) != (version, digest):
            raise DeltaError(
                f"it makes version {header.version} ({header.digest[:16]}…), and {version} ({digest[:16]}…) was "
                "announced; send the whole version"
            )
        changes = [self._decoded(entry, payload) for entry, payload in zip(header.tensors, payloads, strict=True)]
        names = [entry.name for entry in header.tensors]
        if len(set(names)) < len(names):
            raise DeltaError("it changes a tensor twice; send the whole version")
        self._become(header, dict(zip(names, changes, strict=True)))
        return tuple(names)

    def _become(self, header: _Header, changes: dict[str, _Change]) -> None:
        """Apply `changes`, or undo them where they make something else than the header says."""
        undo: dict[str, _Change] = {}
        try:
            for name, change in changes.items():
                undo[name] = change.apply(_bytes(self._tensors[name]))
            parts = {name: tensor_part(LowBitTensor(name, self._tensors[name])) for name in changes}
            made = digest_of_parts((self._parts | parts).values())
            if made != header.digest:
                raise DeltaError(
                    f"it makes a version of digest {made[:16]}…, not {header.digest[:16]}… as it says; send the whole "
                    "version"
                )
        except BaseException:
            for name, change in undo.items():
                change.apply(_bytes(self._tensors[name]))
            raise
        self._parts |= parts
        self.version = header.version

    def _decoded(self, entry: _Entry, payload: memoryview) -> _Change:
        """Read a payload for the tensor it is to change. Raises `DeltaError` where it is not for it."""
        held = self._tensors.get(entry.name)
        if held is None:
            raise DeltaError(f"it changes {entry.name!r}, which is not among the {len(self._tensors)} tensors held")
        ours = (str(held.dtype).removeprefix("torch."), tuple(held.shape))
        if (entry.dtype, entry.shape) != ours:
            raise DeltaError(
                f"its {entry.name!r} is {entry.dtype!r} {list(entry.shape)}, and {ours[0]!r} {list(ours[1])} is held"
            )
        if entry.changes is None:
            if entry.size != held.nbytes:
                raise DeltaError(f"its {entry.name!r} has {entry.size} bytes instead of {held.nbytes}")
            return _Change(None, np.frombuffer(payload, np.uint8))
        if entry.changes > held.nbytes // _FEWEST_BYTES_A_CHANGE:
            raise DeltaError(
                f"it lists {entry.changes} changes of {entry.name!r}, more than one in {_FEWEST_BYTES_A_CHANGE} of its "
                f"{held.nbytes} bytes"
            )
        return _listed(entry, payload, held.nbytes)


def _read(delta: bytes | memoryview, longest: int) -> tuple[_Header, list[memoryview]]:
    """Header, no longer than that, and payloads. Raises `DeltaError` for anything but as many bytes as they are."""
    data = memoryview(delta)
    magic, length = _START.unpack_from(data) if len(data) >= _START.size else (b"", 0)
    end = _START.size + length
    if magic != _MAGIC or end > len(data) or length > longest:
        raise DeltaError(f"its {len(data)} bytes are no delta, or not all of one; send it again")
    try:
        header = _Header.model_validate_json(bytes(data[_START.size : end]))
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        at = ".".join(map(str, problem["loc"])) or "header"
        raise DeltaError(f"its header cannot be read: {at}: {problem['msg']}; send it again") from error
    sizes = [entry.size for entry in header.tensors]
    if sum(sizes) != len(data) - end:
        raise DeltaError(f"{sum(sizes)} bytes of tensors are announced and {len(data) - end} came; send it again")
    payloads = []
    for size in sizes:
        payloads.append(data[end : end + size])
        end += size
    return header, payloads


def _difference(old: Bytes, new: Bytes) -> _Change | None:
    """What turns `old` into `new`; None where nothing does."""
    whole = len(old) // 8 * 8
    old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    buffer = np.empty(_CHUNK // 8, np.uint64)
    most, count = len(old) // _FEWEST_BYTES_A_CHANGE, 0
    positions, values = [], []
    for start in range(0, len(old_words), len(buffer)):
        span = slice(start, start + len(buffer))
        words = np.bitwise_xor(old_words[span], new_words[span], out=buffer[: len(old_words) - start])
        changed = np.flatnonzero(words != 0)
        if len(changed):
            octets = words[changed].view(np.uint8).reshape(-1, 8)
            row, column = np.nonzero(octets)
            positions.append((start + changed[row]) * 8 + column)
            values.append(octets[row, column])
            count += len(row)
            if count > most:
                return _Change(None, new)
    tail = old[whole:] ^ new[whole:]
    positions.append(whole + np.flatnonzero(tail))
    values.append(tail[tail != 0])
    count += len(positions[-1])
    if count > most:
        return _Change(None, new)
    if not count:
        return None
    places = np.concatenate(positions)
    return _Change(places, np.concatenate(values)) if _gaps(places).max() <= _LARGEST_GAP else _Change(None, new)


def _gaps(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Unchanged bytes before each changed one."""
    return np.diff(positions, prepend=-1) - 1


def _encoded(change: _Change) -> bytes:
    if change.positions is None:
        return change.values.tobytes()
    gaps = _gaps(change.positions).astype("<u4")
    planes = np.concatenate([gaps.view(np.uint8).reshape(-1, 4).T.reshape(-1), change.values])
    return _ZSTD.compress(planes, asbytes=True)


def _listed(entry: _Entry, payload: memoryview, held: int) -> _Change:
    """The changes that a payload lists, of a tensor of `held` bytes."""
    assert entry.changes is not None
    try:
        raw = _ZSTD.decompress(payload, decompressed_size=_PLANES * entry.changes, asbytes=True)
    except OSError as error:
        raise DeltaError(f"its {entry.name!r} cannot be decompressed: {error}; send it again") from error
    planes = np.frombuffer(raw, np.uint8).reshape(_PLANES, entry.changes)
    gaps = np.ascontiguousarray(planes[:4].T).view("<u4").reshape(-1)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(positions) and positions[-1] >= held:
        raise DeltaError(f"it changes byte {positions[-1]} of {entry.name!r}, which has {held}; send it again")
    return _Change(positions, planes[4])


def _bytes(tensor: torch.Tensor) -> Bytes:
    """A contiguous CPU tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
