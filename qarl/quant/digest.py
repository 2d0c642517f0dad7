"""A digest of named tensors, a stream of them or a model's parameters: name, dtype, shape and bytes
of each, in order.

XXH3-128, a hash at the speed of memory. It sees a fault (a tensor lost, torn, stale, swapped or
renamed, a flipped bit) but for a chance of about 2^-128. It is no signature: who sets out to can
make other bytes with the same digest.

Bytes are hashed in pieces of a fixed size, so that all of the machine's cores can share a tensor:
the digest of a stream is the hash of, tensor after tensor, its header and the hash of each of its
pieces. It does not depend on how many threads there were, nor on the tensors' device or strides.
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
_PIECES_A_THREAD = 4
"""Below 4 MiB, about 0.25 ms of hashing, handing work to a thread costs more than it saves."""

_AT_ONCE = 1 << 25
"""Bytes of a GPU's tensors that go to the host in one copy: a model of experts has tens of
thousands of small ones.
"""


@dataclass
class _Pieces:
    """The hashes of a tensor's pieces; None until its bytes are on the host."""

    digests: list[bytes] | None = None


class StreamDigest:
    """Feed tensors in stream order; `hexdigest()` identifies names, dtypes, shapes and bytes
    together.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[bytes, _Pieces]] = []
        self._waiting: list[tuple[torch.Tensor, _Pieces]] = []
        self._waiting_bytes = 0
        self.bytes = 0
        self.tensors = 0

    def update(self, item: LowBitTensor) -> None:
        """Add one tensor. On CPU its bytes have been read, in place, when this returns; a GPU's
        tensor must stay as it is until the stream ends, or `hexdigest()`.
        """
        self._parts.append((_header(item), self._pieces(item.tensor)))
        self.bytes += item.tensor.nbytes
        self.tensors += 1

    def over(self, stream: Iterable[LowBitTensor]) -> Iterator[LowBitTensor]:
        """The stream, each tensor added as it goes by; at its end all have been read."""
        for item in stream:
            self.update(item)
            yield item
        self._read_waiting()

    def _pieces(self, tensor: torch.Tensor) -> _Pieces:
        pieces = self._read(tensor)
        if not tensor.is_inference():  # those count no writes
            _last.clear()
            _last[tensor] = (tensor._version, pieces)
        return pieces

    def _read(self, tensor: torch.Tensor) -> _Pieces:
        if not _on_gpu(tensor):
            return _Pieces(_hashed(tensor))
        self._waiting.append((tensor, pieces := _Pieces()))
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes >= _AT_ONCE:
            self._read_waiting()
        return pieces

    def _read_waiting(self) -> None:
        if not self._waiting:
            return
        flat = [
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for tensor, _ in self._waiting
        ]
        packed = torch.cat(flat) if len(flat) > 1 else flat[0]
        host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=packed.is_cuda).copy_(packed)
        for part, (_, pieces) in zip(
            host.split([len(part) for part in flat]), self._waiting, strict=True
        ):
            pieces.digests = _hashed(part)
        self._waiting.clear()
        self._waiting_bytes = 0

    def hexdigest(self) -> str:
        """Of everything fed so far, 32 hex digits."""
        self._read_waiting()
        digest = xxhash.xxh3_128()
        for header, pieces in self._parts:
            assert pieces.digests is not None, (
                "a sender's stream has ended before its receiver's digest is taken"
            )
            digest.update(header + b"".join(pieces.digests))
        return digest.hexdigest()


def digested(stream: Iterable[LowBitTensor]) -> StreamDigest:
    """Of a stream whose tensors go nowhere else."""
    digest = StreamDigest()
    for _ in digest.over(stream):
        pass
    return digest


class ReceivedDigest(StreamDigest):
    """Of a stream that arrives. A tensor that is the very object `StreamDigest` took last,
    unwritten since as far as torch counts writes, was not carried anywhere: its bytes are those the
    sender read. Any other is read again.
    """

    def _pieces(self, tensor: torch.Tensor) -> _Pieces:
        sent = _last.get(tensor)
        return sent[1] if sent is not None and sent[0] == tensor._version else self._read(tensor)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


_last: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The tensor that was last taken for sending, how often it had been written to, and the hashes of
its pieces.
"""


def tensor_part(item: LowBitTensor) -> bytes:
    """What one tensor adds to its stream's digest; to be kept where most tensors of a stream stay
    what they are.
    """
    return _header(item) + b"".join(_hashed(item.tensor))


def digest_of_parts(parts: Iterable[bytes]) -> str:
    """The digest of the stream whose tensors these are the parts of (`tensor_part`), in stream
    order.
    """
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


def parameters_digest(parameters: Mapping[str, nn.Parameter]) -> str:
    """Hex digest of a model's parameters as a stream, each gathered whole while it is read."""
    whole = ((name, p if shard_of(p) is None else whole_value(p)) for name, p in parameters.items())
    return digested(LowBitTensor(name, parameter) for name, parameter in whole).hexdigest()


def _header(item: LowBitTensor) -> bytes:
    return f"{item.name}|{item.tensor.dtype}|{tuple(item.tensor.shape)}|".encode()


def _hashed(tensor: torch.Tensor) -> list[bytes]:
    """Of each piece of its bytes; the last one may be shorter. xxhash lets go of the interpreter
    while it hashes.
    """
    if not tensor.numel():
        return []
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

    def some(start: int, stop: int) -> bytes:
        ends = ((i * _PIECE, (i + 1) * _PIECE) for i in range(start, stop))
        return b"".join(xxhash.xxh3_128_digest(data[a:b]) for a, b in ends)

    return in_threads(some, -(-len(data) // _PIECE), _PIECES_A_THREAD)
