"""SHA-256 over a stream of named tensors: name, dtype, shape and bytes of each, in order."""

import hashlib

import torch

from quant.model import LowBitTensor


class StreamDigest:
    """Feed tensors in stream order; `hexdigest()` identifies names, dtypes, shapes and bytes together."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.bytes = 0
        self.tensors = 0

    def update(self, item: LowBitTensor) -> None:
        """Add one tensor; its bytes are read in place on CPU."""
        tensor = item.tensor.detach().contiguous().cpu()
        self._hash.update(f"{item.name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():
            self._hash.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        self.bytes += tensor.numel() * tensor.element_size()
        self.tensors += 1

    def hexdigest(self) -> str:
        """Hex SHA-256 of everything fed so far."""
        return self._hash.hexdigest()
