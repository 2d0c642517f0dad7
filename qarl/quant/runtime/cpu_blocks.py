"""Processing of rows in blocks, so that intermediate results stay in a CPU's cache.

As long as each row is computed on its own, the result has the same bits as with all rows at once.
"""

from collections.abc import Iterator

import torch

_ELEMENTS = 1 << 17
"""Elements of a block on CPUs: 512 KiB in fp32."""


def row_blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield a block of rows of each tensor at a time; on devices other than CPUs, all rows at once.

    All tensors have equally many rows, and the first is the largest.
    """
    first = tensors[0]
    rows = first.shape[0]
    size = rows
    if first.device.type == "cpu":
        size = _ELEMENTS * rows // max(1, first.numel())
    return zip(*(t.split(max(1, size)) for t in tensors), strict=True)
