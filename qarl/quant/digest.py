"""Digest of named tensors: of a stream or of a model's parameters.

It covers the name, dtype, shape and bytes of each tensor, in order. The hash is XXH3-128, which
runs at the speed of memory. It misses a fault (a tensor lost, torn, stale, swapped or renamed, a
flipped bit) with a probability of about 2^-128. It is not a signature: an attacker can make other
bytes with the same digest.

Bytes are hashed in pieces of a fixed size, so that all cores can share a tensor. The digest of a
stream is the hash of every tensor's header followed by the hashes of its pieces, in order. It does
not depend on the number of threads, nor on the tensors' device or strides.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from qarl.quant.runtime.shards import shard_of, whole_value
from qarl.quant.runtime.thread_pool import in_threads
from qarl.quant.types import LowBitTensor

_PIECE = 1 << 20
"""Size of a piece in bytes."""
_PIECES_A_THREAD = 4
"""Least number of pieces for a thread.

Below 4 MiB, about 0.25 ms of hashing, handing work to a thread costs more than it saves.
"""

_AT_ONCE = 1 << 25
"""Bytes of a GPU's tensors that are copied to the host together.

A model with experts has tens of thousands of small tensors.
"""


@dataclass
class _Pieces:
    """Hashes of one tensor's pieces."""

    digests: list[bytes] | None = None
    """The hashes, in order; None until the tensor's bytes are on the host."""


class StreamDigest:
    """Digest of a stream, computed while its tensors are fed in order.

    `hexdigest()` identifies names, dtypes, shapes and bytes together.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[bytes, _Pieces]] = []
        """Header and hashes of every tensor."""
        self._waiting: list[tuple[torch.Tensor, _Pieces]] = []
        """A GPU's tensors that are not yet copied to the host."""
        self._waiting_bytes = 0
        self.bytes = 0
        """Total size of the tensors fed so far."""
        self.tensors = 0
        """Number of tensors fed so far."""

    def update(self, item: LowBitTensor) -> None:
        """Add one tensor.

        A CPU tensor has been read, in place, when this returns. A GPU tensor must not change until
        the stream ends or `hexdigest()` is called.
        """
        self._parts.append((_header(item), self._pieces(item.tensor)))
        self.bytes += item.tensor.nbytes
        self.tensors += 1

    def over(self, stream: Iterable[LowBitTensor]) -> Iterator[LowBitTensor]:
        """Yield the tensors of a stream and add each one; all have been read at its end."""
        for item in stream:
            self.update(item)
            yield item
        self._read_waiting()

    def _pieces(self, tensor: torch.Tensor) -> _Pieces:
        """Hash a tensor, and remember it for `ReceivedDigest`."""
        pieces = self._read(tensor)
        # Inference tensors do not count writes, so a later write to one would go unnoticed.
        if not tensor.is_inference():
            _last.clear()
            _last[tensor] = (tensor._version, pieces)
        return pieces

    def _read(self, tensor: torch.Tensor) -> _Pieces:
        """Hash a CPU tensor now; queue a GPU tensor and return hashes that are filled in later."""
        if not _on_gpu(tensor):
            return _Pieces(_hashed(tensor))
        pieces = _Pieces()
        self._waiting.append((tensor, pieces))
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes >= _AT_ONCE:
            self._read_waiting()
        return pieces

    def _read_waiting(self) -> None:
        """Copy the queued tensors to the host together, and hash each."""
        if not self._waiting:
            return
        flat = [
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for tensor, _ in self._waiting
        ]
        packed = torch.cat(flat) if len(flat) > 1 else flat[0]
        host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=packed.is_cuda).copy_(packed)
        parts = host.split([len(part) for part in flat])
        for part, (_, pieces) in zip(parts, self._waiting, strict=True):
            pieces.digests = _hashed(part)
        self._waiting.clear()
        self._waiting_bytes = 0

    def hexdigest(self) -> str:
        """Return the digest of everything fed so far, 32 hex digits."""
        self._read_waiting()
        digest = xxhash.xxh3_128()
        for header, pieces in self._parts:
            assert pieces.digests is not None, (
                "a sender's stream has ended before its receiver's digest is taken"
            )
            digest.update(header + b"".join(pieces.digests))
        return digest.hexdigest()


def digested(stream: Iterable[LowBitTensor]) -> StreamDigest:
    """Return the digest of a stream, which this consumes."""
    digest = StreamDigest()
    for _ in digest.over(stream):
        pass
    return digest


class ReceivedDigest(StreamDigest):
    """Digest of a stream that arrives.

    If a tensor is the very object that `StreamDigest` took last, and torch counts no write to it
    since, then it was not transported: its bytes are those the sender hashed, and are not read
    again. Any other tensor is read.
    """

    def _pieces(self, tensor: torch.Tensor) -> _Pieces:
        """Return the hashes that the sender computed if they are still valid, else hash again."""
        last = _last.get(tensor)
        if last is None:
            return self._read(tensor)
        writes, pieces = last
        return pieces if writes == tensor._version else self._read(tensor)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


_last: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The last tensor that was hashed for sending → (torch's count of writes to it, its hashes)."""


def tensor_part(item: LowBitTensor) -> bytes:
    """Return the bytes that one tensor adds to its stream's digest.

    A caller can store them if most tensors of a stream do not change.
    """
    return _header(item) + b"".join(_hashed(item.tensor))


def digest_of_parts(parts: Iterable[bytes]) -> str:
    """Return the digest of the stream whose tensors have these parts (`tensor_part`), in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


def parameters_digest(parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the digest of a model's parameters as a stream, 32 hex digits.

    Each sharded parameter is gathered while it is read, which is a collective call.
    """

    def stream() -> Iterator[LowBitTensor]:
        for name, parameter in parameters.items():
            full = parameter if shard_of(parameter) is None else whole_value(parameter)
            yield LowBitTensor(name, full)

    return digested(stream()).hexdigest()


def _header(item: LowBitTensor) -> bytes:
    """Return a tensor's name, dtype and shape as bytes."""
    return f"{item.name}|{item.tensor.dtype}|{tuple(item.tensor.shape)}|".encode()


def _hashed(tensor: torch.Tensor) -> list[bytes]:
    """Return the hashes of a tensor's pieces, in order; the last piece may be shorter.

    An item of the list may be the hashes of several pieces that one thread took, joined. xxhash
    releases the interpreter lock while it hashes.
    """
    if not tensor.numel():
        return []
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

    def hash_pieces(start: int, stop: int) -> bytes:
        edges = ((i * _PIECE, (i + 1) * _PIECE) for i in range(start, stop))
        return b"".join(xxhash.xxh3_128_digest(data[a:b]) for a, b in edges)

    pieces = -(-len(data) // _PIECE)
    return in_threads(hash_pieces, pieces, _PIECES_A_THREAD)
