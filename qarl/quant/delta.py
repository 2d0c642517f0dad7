"""Weight version as a delta: which bytes of the previous version's packed tensors changed, and how.

A step at a learning rate of 1e-6 changes one packed byte in thousands, so its delta is a hundredth
of the version or less (docs/explain/publish.md). Both ends hold the previous version in host
memory (`VersionCache`). A delta names the digest of its base version and the digest of the version
it makes. It is applied completely or not at all: a delta that is truncated, altered or meant for
another version is refused with `DeltaError`, and nothing has changed. The digests are those of a
stream (`quant.digest`). They protect against faults, not attackers; the transport must know who may
announce a version.

Layout, integers little-endian:

    b"qarl-dlt" | size of the header in bytes, uint32 | header, JSON (`_Header`) | payloads of its
    tensors, one after the other

Only tensors that changed are listed, each with its blocks of 16 MiB. If N of a block's bytes
changed, and N is at most half of them, its payload is five planes of N bytes each, compressed
together by zstd. The first four planes are the bytes, lowest first, of a uint32 per changed byte:
its distance to the previous changed byte, minus one. The fifth plane is the XOR of each changed
byte's old and new value. If more bytes changed, the payload is the block's new bytes.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, Field, ValidationError

from qarl.configs.errors import QarlError
from qarl.quant.digest import digest_of_parts, tensor_part
from qarl.quant.runtime.thread_pool import in_threads
from qarl.quant.types import LowBitTensor

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"qarl-dlt"
_START = struct.Struct("<8sI")
"""Magic bytes and size of the header, at the start of a delta."""
_PLANES = 5
_BLOCK = 1 << 24
"""Size of a block in bytes."""
_CHUNK = 1 << 18
"""Bytes compared at a time, so few that both sides and their XOR stay in a core's cache."""

_FEWEST_BYTES_A_CHANGE = 2
"""Fewest bytes of a block per listed change; a block with more changes is sent as its bytes.

This also bounds the memory that a delta can make a receiver allocate, to a few times a block.
"""

_HEADER_BYTES_A_TENSOR = 2048
"""Upper bound on the header's bytes per tensor, with a name of 1,024 characters."""
_HEADER_BYTES_A_BLOCK = 64
"""Upper bound on the header's bytes per block."""

Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@cache
def _zstd() -> Any:
    """Return the zstd codec."""
    # Imported only when needed, because the import starts a thread.
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=1)


class DeltaError(QarlError, heading="delta"):
    """Raised for a delta that is damaged or has another base than the held version.

    Nothing was changed.
    """


class _Block(BaseModel, strict=True, extra="forbid", frozen=True):
    """Header entry of one block of a changed tensor."""

    changes: Count | None
    """Number of changed bytes that the payload lists; None if it is the block's bytes."""
    size: Count
    """Size of the payload in bytes."""


class _Entry(BaseModel, strict=True, extra="forbid", frozen=True):
    """Header entry of one changed tensor."""

    name: Annotated[str, Field(max_length=1024)]
    """Name of the tensor."""
    dtype: Annotated[str, Field(max_length=32)]
    """Dtype of the tensor, e.g. "int32"."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    blocks: tuple[_Block, ...]
    """All of its blocks, including those that did not change."""


class _Header(BaseModel, strict=True, extra="forbid", frozen=True):
    """Header of a delta."""

    version: int
    """Number of the version that the delta makes."""
    digest: Digest
    """Digest of the version that the delta makes."""
    base: int
    """Number of the version that the delta is applied to."""
    base_digest: Digest
    """Digest of the version that the delta is applied to."""
    tensors: tuple[_Entry, ...]
    """The tensors that changed."""


class VersionCache:
    """One weight version in host memory, which deltas are made from and applied to.

    Attributes:
        version: number of the version.
        bytes: total size of its tensors.
    """

    def __init__(
        self,
        version: int,
        stream: Iterable[LowBitTensor],
        reuse: "VersionCache | None" = None,
    ):
        """Copy `stream` into host memory as `version`.

        reuse: an obsolete version whose buffers are overwritten, because memory that a process
        touches for the first time is slower than the copy. It cannot be used afterwards.
        """
        self.version = version
        free = {} if reuse is None else reuse._tensors
        self._tensors = {
            item.name: _copied(item.tensor.detach(), free.pop(item.name, None)) for item in stream
        }
        self._parts = {item.name: tensor_part(item) for item in self.tensors()}
        """Each tensor's part of the digest."""
        self.bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def digest(self) -> str:
        """Digest of the version's stream, 32 hex digits."""
        return digest_of_parts(self._parts.values())

    def tensors(self) -> Iterator[LowBitTensor]:
        """Yield the held stream, in order, without a copy; later versions overwrite its tensors."""
        return (LowBitTensor(name, tensor) for name, tensor in self._tensors.items())

    def make_delta(self, version: int, stream: Iterable[LowBitTensor]) -> bytes:
        """Replace the held version by `stream`, and return the delta that does so elsewhere.

        `stream` must have the same tensors; it becomes `version`. The delta is at most the size of
        the version plus the header. Raises `DeltaError` for other tensors; the cache is then
        partly overwritten and cannot be used.
        """
        base = self.version
        base_digest = self.digest
        entries: list[_Entry] = []
        payloads: list[bytes] = []
        expected = iter(self._tensors.items())
        for item in stream:
            name, previous = next(expected, ("nothing more", torch.empty(0)))
            new = item.tensor.detach().cpu().contiguous()
            kind = (item.name, new.dtype, new.shape)
            if kind != (name, previous.dtype, previous.shape):
                raise DeltaError(
                    f"{item.name!r} came where version {base} has {name!r}; send the whole version"
                )
            blocks = _overwrite(_bytes(previous), _bytes(new))
            if any(payload for _, payload in blocks):
                self._parts[name] = tensor_part(LowBitTensor(name, previous))
                entries.append(_entry(name, previous, blocks))
                payloads += [payload for _, payload in blocks]
        missing = next(expected, None)
        if missing:
            raise DeltaError(
                f"nothing came where version {base} has {missing[0]!r}; send the whole version"
            )
        self.version = version
        header = _Header(
            version=version,
            digest=self.digest,
            base=base,
            base_digest=base_digest,
            tensors=tuple(entries),
        )
        encoded = header.model_dump_json().encode()
        return b"".join([_START.pack(_MAGIC, len(encoded)), encoded, *payloads])

    def apply(self, delta: bytes | memoryview, version: int, digest: str) -> None:
        """Replace the held version by the one that `delta` makes.

        version and digest are those that the sender announced. Raises `DeltaError`, with the held
        version unchanged, if the delta is damaged, has another base than the held version, or makes
        another version than was announced.
        """
        blocks = len(self._tensors) + self.bytes // _BLOCK
        longest = _HEADER_BYTES_A_TENSOR * (1 + len(self._tensors)) + _HEADER_BYTES_A_BLOCK * blocks
        header, payload = _read(delta, longest)
        if (header.base, header.base_digest) != (self.version, self.digest):
            raise DeltaError(
                f"it is from version {header.base} ({header.base_digest[:16]}…), and version"
                f" {self.version} ({self.digest[:16]}…) is held here; send the whole version"
            )
        if (header.version, header.digest) != (version, digest):
            raise DeltaError(
                f"it makes version {header.version} ({header.digest[:16]}…), and {version}"
                f" ({digest[:16]}…) was announced; send the whole version"
            )
        if len({entry.name for entry in header.tensors}) < len(header.tensors):
            raise DeltaError("it changes a tensor twice; send the whole version")
        for entry in header.tensors:
            self._check(entry)
        self._become(header, payload)

    def _check(self, entry: _Entry) -> None:
        """Raise `DeltaError` if an entry does not fit the held tensor or has too many changes."""
        previous = self._tensors.get(entry.name)
        if previous is None:
            raise DeltaError(
                f"it changes {entry.name!r}, which is not among the {len(self._tensors)} tensors"
                " held"
            )
        ours = (str(previous.dtype).removeprefix("torch."), tuple(previous.shape))
        if (entry.dtype, entry.shape) != ours:
            raise DeltaError(
                f"its {entry.name!r} is {entry.dtype!r} {list(entry.shape)}, and {ours[0]!r}"
                f" {list(ours[1])} is held"
            )
        held_blocks = _blocks(_bytes(previous))
        if len(entry.blocks) != len(held_blocks):
            raise DeltaError(
                f"its {entry.name!r} has {len(entry.blocks)} blocks instead of {len(held_blocks)}"
            )
        for block, octets in zip(entry.blocks, held_blocks, strict=True):
            if block.changes is None and block.size != len(octets):
                raise DeltaError(
                    f"its {entry.name!r} has a block of {block.size} bytes instead of {len(octets)}"
                )
            if block.changes is not None and block.changes > len(octets) // _FEWEST_BYTES_A_CHANGE:
                raise DeltaError(
                    f"it lists {block.changes} changes of {entry.name!r}, more than one in"
                    f" {_FEWEST_BYTES_A_CHANGE} of the {len(octets)} bytes of a block"
                )

    def _become(self, header: _Header, payload: memoryview) -> None:
        """Apply a delta whose header was checked.

        If a payload cannot be read, or the result has another digest than the header's, undo all of
        it and raise.
        """
        undo: list[tuple[Bytes, int | None, Bytes | memoryview]] = []
        try:
            for entry in header.tensors:
                held_blocks = _blocks(_bytes(self._tensors[entry.name]))
                for block, octets in zip(entry.blocks, held_blocks, strict=True):
                    part = payload[: block.size]
                    payload = payload[block.size :]
                    # Listed changes are XORs, which undo themselves when they are applied again.
                    before = octets.copy() if block.changes is None else part
                    _apply(octets, block.changes, part, entry.name)
                    undo.append((octets, block.changes, before))
            parts = {
                e.name: tensor_part(LowBitTensor(e.name, self._tensors[e.name]))
                for e in header.tensors
            }
            actual = digest_of_parts((self._parts | parts).values())
            if actual != header.digest:
                raise DeltaError(
                    f"it makes a version of digest {actual[:16]}…, not {header.digest[:16]}… as it"
                    " says; send the whole version"
                )
        except BaseException:
            for octets, changes, before in undo:
                _apply(octets, changes, before, "")
            raise
        self._parts |= parts
        self.version = header.version


def _read(delta: bytes | memoryview, longest: int) -> tuple[_Header, memoryview]:
    """Split a delta into its header and its payloads.

    Raises `DeltaError` if the header is longer than `longest` bytes or cannot be read, or if there
    are more or fewer bytes than it announces.
    """
    data = memoryview(delta)
    magic, length = _START.unpack_from(data) if len(data) >= _START.size else (b"", 0)
    end = _START.size + length
    if magic != _MAGIC or end > len(data) or length > longest:
        raise DeltaError(f"its {len(data)} bytes are not a delta, or not all of one; send it again")
    try:
        header = _Header.model_validate_json(bytes(data[_START.size : end]))
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or "header"
        raise DeltaError(
            f"its header cannot be read: {field}: {problem['msg']}; send it again"
        ) from error
    announced = sum(block.size for entry in header.tensors for block in entry.blocks)
    if announced != len(data) - end:
        raise DeltaError(
            f"{announced} bytes of tensors are announced and {len(data) - end} came; send it again"
        )
    return header, data[end:]


def _entry(
    name: str,
    tensor: torch.Tensor,
    blocks: Iterable[tuple[int | None, bytes]],
) -> _Entry:
    """Return the header's entry of a changed tensor. blocks: changes and payload of each block."""
    return _Entry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        blocks=tuple(_Block(changes=changes, size=len(payload)) for changes, payload in blocks),
    )


def _overwrite(old: Bytes, new: Bytes) -> list[tuple[int | None, bytes]]:
    """Write `new` over `old`; return the changes and the payload of every block."""
    pairs = list(zip(_blocks(old), _blocks(new), strict=True))

    def encode_some(start: int, stop: int) -> list[tuple[int | None, bytes]]:
        return [_encoded(*pair) for pair in pairs[start:stop]]

    parts = in_threads(encode_some, len(pairs), 1)
    blocks = list(itertools.chain.from_iterable(parts))
    for (target, octets), (changes, payload) in zip(pairs, blocks, strict=True):
        if changes is None:
            target[:] = octets
        else:
            _apply(target, changes, payload, "")
    return blocks


def _encoded(old: Bytes, new: Bytes) -> tuple[int | None, bytes]:
    """Return the number of listed changes of one block, or None, and its payload."""
    changed = _changes(old, new)
    if changed is None:
        return None, new.tobytes()
    positions, values = changed
    if not len(positions):
        return 0, b""
    gaps = (np.diff(positions, prepend=-1) - 1).astype("<u4")
    gap_planes = gaps.view(np.uint8).reshape(-1, 4).T
    planes = np.concatenate([gap_planes.reshape(-1), values])
    return len(positions), _zstd().compress(planes, asbytes=True)


def _changes(
    old: Bytes,
    new: Bytes,
) -> tuple[npt.NDArray[np.int64], Bytes] | None:
    """Return the rising positions at which two blocks differ, and the XOR of the bytes there.

    None if more bytes differ than may be listed.
    """
    # Compare eight bytes at a time, then the up to seven that remain.
    aligned = len(old) // 8 * 8
    old_words = old[:aligned].view(np.uint64)
    new_words = new[:aligned].view(np.uint64)
    buffer = np.empty(_CHUNK // 8, np.uint64)
    positions = []
    values = []
    for start in range(0, len(old_words), len(buffer)):
        span = slice(start, start + len(buffer))
        words = np.bitwise_xor(
            old_words[span], new_words[span], out=buffer[: len(old_words) - start]
        )
        changed = np.flatnonzero(words != 0)
        if len(changed):
            octets = words[changed].view(np.uint8).reshape(-1, 8)
            row, column = np.nonzero(octets)
            positions.append((start + changed[row]) * 8 + column)
            values.append(octets[row, column])
    tail = old[aligned:] ^ new[aligned:]
    positions.append(aligned + np.flatnonzero(tail))
    values.append(tail[tail != 0])
    if sum(map(len, positions)) > len(old) // _FEWEST_BYTES_A_CHANGE:
        return None
    return np.concatenate(positions), np.concatenate(values)


def _apply(
    octets: Bytes, changes: int | None, payload: bytes | memoryview | Bytes, name: str
) -> None:
    """Change a block in place as its payload says.

    Listed changes undo themselves when they are applied again. name is the tensor's, for error
    messages.
    """
    if changes is None:
        octets[:] = np.frombuffer(payload, np.uint8)
    elif changes or len(payload):
        try:
            raw = _zstd().decompress(payload, decompressed_size=_PLANES * changes, asbytes=True)
        except OSError as error:
            raise DeltaError(
                f"its {name!r} cannot be decompressed: {error}; send it again"
            ) from error
        planes = np.frombuffer(raw, np.uint8).reshape(_PLANES, changes)
        gaps = np.ascontiguousarray(planes[:4].T).view("<u4").reshape(-1)
        positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if changes and positions[-1] >= len(octets):
            raise DeltaError(
                f"it changes byte {positions[-1]} of {len(octets)} of {name!r}; send it again"
            )
        octets[positions] ^= planes[4]


def _copied(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor to contiguous host memory, into `buffer` if that has its shape and dtype."""
    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
    return buffer.copy_(tensor)


def _blocks(octets: Bytes) -> list[Bytes]:
    """Cut a tensor's bytes into blocks, as views."""
    return [octets[start : start + _BLOCK] for start in range(0, len(octets), _BLOCK)]


def _bytes(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
