"""Masters that ZeRO-3 has cut into one piece a process.

Such a parameter is empty until it is gathered. What the forward reads (codes, compute-dtype copies) is whole in every
process; a master is whole only while it is materialized, one layer at a time, because scales are of whole rows and
quantization groups. Parameters that nothing has partitioned pass through all of this untouched.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter, gathered or not."""
    return getattr(parameter, "ds_shape", parameter.shape)


@contextmanager
def gathered(parameters: Iterable[nn.Parameter], modified: bool = False) -> Iterator[None]:
    """Within this context the parameters are whole. All processes have to enter it together.

    modified: they are written to, the same values in every process; what was written is kept, else it is lost.
    """
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    if not partitioned:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(partitioned, modifier_rank=0 if modified else None):
        yield
