"""A digest of named tensors, a stream of them or a model's parameters: name, dtype, shape and bytes of each, in order.

XXH3-128, a hash at the speed of memory. It sees a fault (a tensor lost, torn, stale, swapped or renamed, a flipped bit)
but for a chance of about 2^-128. It is no signature: who sets out to can make other bytes with the same digest.

Bytes are hashed in pieces of a fixed size, so that all of the machine's cores can share a tensor: the digest of a
stream is the hash of, tensor after tensor, its header and the hash of each of its pieces. It does not depend on how
many threads there were, nor on the tensors' device or strides.
"""

from collections.abc import Iterable, Iterator, Mapping

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


class StreamDigest:
    """Feed tensors in stream order; `hexdigest()` identifies names, dtypes, shapes and bytes together."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.bytes = 0
        self.tensors = 0

    def update(self, item: LowBitTensor) -> None:
        """Add one tensor; its bytes have been read, in place on CPU, when this returns."""
        self._hash.update(_header(item))
        for digest in self._digests(item.tensor):
            self._hash.update(digest)
        self.bytes += item.tensor.nbytes
        self.tensors += 1

    def over(self, stream: Iterable[LowBitTensor]) -> Iterator[LowBitTensor]:
        """The stream, each tensor added as it goes by."""
        for item in stream:
            self.update(item)
            yield item

    def _digests(self, tensor: torch.Tensor) -> list[bytes]:
        """Of each piece of its bytes."""
        digests = _hashed(tensor)
        if not tensor.is_inference():  # those count no writes
            _last.clear()
            _last[tensor] = (tensor._version, digests)
        return digests

    def hexdigest(self) -> str:
        """Of everything fed so far, 32 hex digits."""
        return self._hash.hexdigest()


def digested(stream: Iterable[LowBitTensor]) -> StreamDigest:
    """Of a stream whose tensors go nowhere else."""
    digest = StreamDigest()
    for item in stream:
        digest.update(item)
    return digest


class ReceivedDigest(StreamDigest):
    """Of a stream that arrives. A tensor that is the very object `StreamDigest` hashed last, unwritten since as far as
    torch counts writes, was not carried anywhere: its bytes are those the sender read. Any other is read again."""

    def _digests(self, tensor: torch.Tensor) -> list[bytes]:
        sent = _last.get(tensor)
        if sent is not None and sent[0] == tensor._version:
            return sent[1]
        return _hashed(tensor)


_last: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The tensor hashed last for sending, how often it had been written to, and the hashes of its pieces."""


def tensor_part(item: LowBitTensor) -> bytes:
    """What one tensor adds to its stream's digest; to be kept where most tensors of a stream stay what they are."""
    return _header(item) + b"".join(_hashed(item.tensor))


def digest_of_parts(parts: Iterable[bytes]) -> str:
    """The digest of the stream whose tensors these are the parts of (`tensor_part`), in stream order."""
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


def parameters_digest(parameters: Mapping[str, nn.Parameter]) -> str:
    """Hex digest of a model's parameters as a stream, each gathered whole while it is read."""
    whole = ((name, p if shard_of(p) is None else whole_value(p)) for name, p in parameters.items())
    return digested(LowBitTensor(name, parameter) for name, parameter in whole).hexdigest()


def _header(item: LowBitTensor) -> bytes:
    return f"{item.name}|{item.tensor.dtype}|{tuple(item.tensor.shape)}|".encode()


def _hashed(tensor: torch.Tensor) -> list[bytes]:
    """Of each piece of its bytes; the last one may be shorter. xxhash lets go of the interpreter while it hashes."""
    if not tensor.numel():
        return []
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

    def some(start: int, stop: int) -> bytes:
        ends = ((i * _PIECE, (i + 1) * _PIECE) for i in range(start, stop))
        return b"".join(xxhash.xxh3_128_digest(data[a:b]) for a, b in ends)

    return in_threads(some, -(-len(data) // _PIECE), _PIECES_A_THREAD)
