"""Write a stream of tensors as safetensors files."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from qarl.quant.digest import StreamDigest
from qarl.quant.types import LowBitTensor

_FILE_BYTES = 4 * 2**30
"""Size in bytes at which a file is closed and the next one begun."""


def write_tensors(
    stream: Iterable[LowBitTensor], folder: Path, digest: StreamDigest
) -> Iterator[tuple[str, list[str]]]:
    """Write a stream into a folder as tensors-0.safetensors, tensors-1.safetensors and so on.

    Each file is closed once it holds 4 GiB or more. An empty stream still makes one file. Every
    tensor is added to `digest`. Yields, in order, each file's name and the names of its tensors.
    """
    pending: dict[str, torch.Tensor] = {}
    size = 0
    written = 0

    def flush() -> tuple[str, list[str]]:
        """Write the pending tensors into the next file; return its name and theirs."""
        file = folder / f"tensors-{written}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read, and servers run as other users.
        file.chmod(0o644)
        names = list(pending)
        pending.clear()
        return file.name, names

    for item in digest.over(stream):
        pending[item.name] = item.tensor.detach().contiguous()
        size += item.tensor.nbytes
        if size >= _FILE_BYTES:
            yield flush()
            size = 0
            written += 1
    if pending or not written:
        yield flush()
