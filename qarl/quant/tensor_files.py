"""A stream of tensors as safetensors files."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from qarl.quant.digest import StreamDigest
from qarl.quant.types import LowBitTensor

_FILE_BYTES = 4 * 2**30


def write_tensors(
    stream: Iterable[LowBitTensor], folder: Path, digest: StreamDigest
) -> Iterator[tuple[str, list[str]]]:
    """Write a stream into a folder as tensors-0.safetensors and on, as many files as it takes at 4
    GiB each, and one at least; all that is written goes into `digest`. Yields each file's name, and
    those of the tensors in it, in order.
    """
    pending: dict[str, torch.Tensor] = {}
    size = written = 0

    def flush() -> tuple[str, list[str]]:
        file = folder / f"tensors-{written}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        # safetensors writes for the owner alone, and servers run under other users
        file.chmod(0o644)
        names = list(pending)
        pending.clear()
        return file.name, names

    for item in digest.over(stream):
        pending[item.name] = item.tensor.detach().contiguous()
        size += item.tensor.nbytes
        if size >= _FILE_BYTES:
            yield flush()
            size, written = 0, written + 1
    if pending or not written:
        yield flush()
