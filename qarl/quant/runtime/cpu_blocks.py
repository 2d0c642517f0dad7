"""Work on rows a block at a time, so that what is computed on the way stays in a CPU's cache.

Every row comes out as it would with all rows at once, bit for bit, whatever is done to it alone.
"""

from collections.abc import Iterator

import torch

_ELEMENTS = 1 << 17
"""Of a block, on CPUs: 512 KiB in fp32."""


def row_blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of equally many rows, the first of them the largest: a block of rows of each at a
    time; on other devices than CPUs all rows at once.
    """
    first, rows = tensors[0], tensors[0].shape[0]
    size = (
        max(1, _ELEMENTS * rows // max(1, first.numel()))
        if first.device.type == "cpu"
        else max(1, rows)
    )
    return zip(*(t.split(size) for t in tensors), strict=True)
