"""A weight version as its difference from the one before: which bytes of the packed tensors
changed, and how.

A step at a learning rate of 1e-6 changes one packed byte in thousands, so a delta is a hundredth of
the version and smaller (docs/explain/publish.md). Both ends hold the version before in host memory
(`VersionCache`). A delta names the digest of the version it is from and that of the version it
makes, and is applied whole or not at all: what is truncated, altered or meant for another version
is refused with `DeltaError`, and nothing has changed. The digests are those of a stream
(`quant.digest`): proof against faults. Who may announce a version, the transport has to know.

Layout, integers little-endian:

    b"qarl-dlt" | bytes of the header, uint32 | header, JSON (`_Header`) | payloads of its tensors,
    one after the other

Only tensors that changed are listed, each with its blocks of 16 MiB. Where N of a block's bytes
changed, at most half, its payload is five planes of N bytes, compressed together by zstd: the four
bytes, lowest first, of each one's distance to the changed byte before, less one (uint32), then the
XOR of each one's values. Otherwise it is the bytes.
"""

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
_PLANES = 5
_BLOCK = 1 << 24
_CHUNK = 1 << 18
"""Bytes compared at a time: both sides and their XOR stay in a core's cache."""

_FEWEST_BYTES_A_CHANGE = 2
"""A block with more changes than one in so many bytes is sent whole. It also bounds what a delta
can make a receiver allocate, to some times a block.
"""

_HEADER_BYTES_A_TENSOR, _HEADER_BYTES_A_BLOCK = 2048, 64
"""At most, names of 1,024 characters included."""

Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@cache
def _zstd() -> Any:
    import pyarrow  # starts a thread when it is imported: no sooner than it is needed

    return pyarrow.Codec("zstd", compression_level=1)


class DeltaError(QarlError, heading="delta"):
    """A delta that is damaged, or not from the version that is held; nothing was changed."""


class _Block(BaseModel, strict=True, extra="forbid", frozen=True):
    """changes: how many of its bytes are listed, None where it is sent whole. size: of the payload,
    in bytes.
    """

    changes: Count | None
    size: Count


class _Entry(BaseModel, strict=True, extra="forbid", frozen=True):
    """One changed tensor, all of its blocks."""

    name: Annotated[str, Field(max_length=1024)]
    dtype: Annotated[str, Field(max_length=32)]
    shape: tuple[int, ...]
    blocks: tuple[_Block, ...]


class _Header(BaseModel, strict=True, extra="forbid", frozen=True):
    """version: that the delta makes, of this digest. base, base_digest: the version it is from."""

    version: int
    digest: Digest
    base: int
    base_digest: Digest
    tensors: tuple[_Entry, ...]


class VersionCache:
    """One weight version in host memory: what deltas are made from and applied to. Copies `stream`.

    version: its number. digest: of its stream. bytes: of all its tensors. reuse: an obsolete
    version whose buffers are overwritten, since memory that a process touches first is slower than
    the copy.
    """

    def __init__(
        self,
        version: int,
        stream: Iterable[LowBitTensor],
        reuse: "VersionCache | None" = None,
    ):
        self.version = version
        free = {} if reuse is None else reuse._tensors
        self._tensors = {
            item.name: _copied(item.tensor.detach(), free.pop(item.name, None)) for item in stream
        }
        self._parts = {item.name: tensor_part(item) for item in self.tensors()}
        self.bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def digest(self) -> str:
        """32 hex digits."""
        return digest_of_parts(self._parts.values())

    def tensors(self) -> Iterator[LowBitTensor]:
        """The held stream, in its order, nothing copied: later versions are written over it."""
        return (LowBitTensor(name, tensor) for name, tensor in self._tensors.items())

    def make_delta(self, version: int, stream: Iterable[LowBitTensor]) -> bytes:
        """Hold `stream`, of the same tensors, as `version`; returns the delta that does so
        elsewhere.

        It is no larger than the version itself by more than its header. Raises `DeltaError` for
        other tensors; what is held is of no use then.
        """
        base, base_digest = self.version, self.digest
        entries, payloads = [], list[bytes]()
        expected = iter(self._tensors.items())
        for item in stream:
            name, previous = next(expected, ("nothing more", torch.empty(0)))
            new = item.tensor.detach().cpu().contiguous()
            if (item.name, new.dtype, new.shape) != (
                name,
                previous.dtype,
                previous.shape,
            ):
                raise DeltaError(
                    f"{item.name!r} came where version {base} has {name!r}; send the whole version"
                )
            blocks = _advanced(_bytes(previous), _bytes(new))
            if any(payload for _, payload in blocks):
                self._parts[name] = tensor_part(LowBitTensor(name, previous))
                entries.append(
                    _Entry(
                        name=name,
                        dtype=str(previous.dtype).removeprefix("torch."),
                        shape=tuple(previous.shape),
                        blocks=tuple(
                            _Block(changes=changes, size=len(payload))
                            for changes, payload in blocks
                        ),
                    )
                )
                payloads += [payload for _, payload in blocks]
        if missing := next(expected, None):
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
        """Become the version that `delta` makes.

        version, digest: what the sender announced it to make. Raises `DeltaError`, and is what it
        was, where it is damaged, from another version than is held, or makes another than was
        announced.
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
        """Raise `DeltaError` where it is not for the tensor that is held, or more than any of its
        changes.
        """
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
        """Apply what was checked, or undo it where it cannot be read or makes something else than
        the header says.
        """
        undo: list[tuple[Bytes, int | None, Bytes | memoryview]] = []
        try:
            for entry in header.tensors:
                for block, octets in zip(
                    entry.blocks,
                    _blocks(_bytes(self._tensors[entry.name])),
                    strict=True,
                ):
                    part, payload = payload[: block.size], payload[block.size :]
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
    """Header, no longer than that, and payloads. Raises `DeltaError` for anything but as many bytes
    as they are.
    """
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
        raise DeltaError(
            f"its header cannot be read: {at}: {problem['msg']}; send it again"
        ) from error
    announced = sum(block.size for entry in header.tensors for block in entry.blocks)
    if announced != len(data) - end:
        raise DeltaError(
            f"{announced} bytes of tensors are announced and {len(data) - end} came; send it again"
        )
    return header, data[end:]


def _advanced(old: Bytes, new: Bytes) -> list[tuple[int | None, bytes]]:
    """Write `new` over `old`; returns changes and payload of every block."""
    pairs = list(zip(_blocks(old), _blocks(new), strict=True))

    def some(start: int, stop: int) -> list[tuple[int | None, bytes]]:
        return [_encoded(*pair) for pair in pairs[start:stop]]

    blocks = [block for part in in_threads(some, len(pairs), 1) for block in part]
    for (into, octets), (changes, payload) in zip(pairs, blocks, strict=True):
        if changes is None:
            into[:] = octets
        else:
            _apply(into, changes, payload, "")
    return blocks


def _encoded(old: Bytes, new: Bytes) -> tuple[int | None, bytes]:
    """Changes and payload of one block."""
    changed = _changes(old, new)
    if changed is None:
        return None, new.tobytes()
    positions, values = changed
    if not len(positions):
        return 0, b""
    gaps = (np.diff(positions, prepend=-1) - 1).astype("<u4")
    planes = np.concatenate([gaps.view(np.uint8).reshape(-1, 4).T.reshape(-1), values])
    return len(positions), _zstd().compress(planes, asbytes=True)


def _changes(old: Bytes, new: Bytes) -> tuple[npt.NDArray[np.int64], Bytes] | None:
    """Where the bytes of two blocks differ, rising, and their XOR there; None where too many do."""
    whole = len(old) // 8 * 8
    old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    buffer = np.empty(_CHUNK // 8, np.uint64)
    positions, values = [], []
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
    tail = old[whole:] ^ new[whole:]
    positions.append(whole + np.flatnonzero(tail))
    values.append(tail[tail != 0])
    if sum(map(len, positions)) > len(old) // _FEWEST_BYTES_A_CHANGE:
        return None
    return np.concatenate(positions), np.concatenate(values)


def _apply(
    octets: Bytes, changes: int | None, payload: bytes | memoryview | Bytes, name: str
) -> None:
    """Change a block in place as its payload says; listed changes undo themselves. name: of its
    tensor.
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


def _copied(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """In host memory, contiguous; in that of `into` where it is of the same shape and dtype."""
    if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
    return into.copy_(tensor)


def _blocks(octets: Bytes) -> list[Bytes]:
    return [octets[start : start + _BLOCK] for start in range(0, len(octets), _BLOCK)]


def _bytes(tensor: torch.Tensor) -> Bytes:
    """A contiguous CPU tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
