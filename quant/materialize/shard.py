"""A weight quantized by the processes that have its rows, and in low bits whole in all of them.

Axes: O output rows of the whole weight, o of this process, I input columns.
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.runtime.shards import Shard
from qarl.quant.schemes import Scheme


@torch.no_grad()
def materialize_rows(
    rows: torch.Tensor,
    shard: Shard | None,
    scheme: Scheme,
    dtype: torch.dtype,
    layer: str = "weight",
    fused: tuple[torch.Tensor, ...] = (),
    out: LowBitWeight | None = None,
    scale: torch.Tensor | None = None,
) -> LowBitWeight:
    """The codes and scales `materialize` gives for the whole weight, bit for bit, in every process.

    rows: master [o, I], this process's; without a shard all of them, and this is `materialize`. fused: as `materialize`
    takes them, this process's rows of each. out, scale: whole, see there. All processes come here together. Raises what
    `materialize` raises, in the process whose rows are refused.
    """
    if shard is None:
        return materialize(rows, scheme, dtype, layer, fused, out, scale)
    if scheme.fuses_scales:
        fused = (_absmax_of_all((rows, *fused)),)
    whole = out or _room(rows, shard, scheme, dtype, layer)
    start, stop = (edge * whole.shape[0] // shard.shape[0] for edge in shard.edges[shard.rank : shard.rank + 2])
    if start < stop:
        kept = None if scale is None else shard.rows(scale)
        materialize(rows, scheme, dtype, layer, fused, whole.rows(start, stop), kept)
    for tensor in (whole.codes, whole.scale, whole.global_scale):
        if tensor is not None:
            shard.gather(tensor)
    return whole


def _absmax_of_all(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The largest magnitude of all processes' rows, [1]; NaN where one has it."""
    largest = [weight.abs().amax() for weight in weights if weight.numel()]
    here = torch.stack(largest).amax().to(torch.float32) if largest else weights[0].new_zeros((), dtype=torch.float32)
    # A maximum over processes drops a NaN on some backends.
    here = torch.where(here.isnan(), torch.inf, here)
    dist.all_reduce(here, dist.ReduceOp.MAX)
    return here.to(weights[0].dtype).reshape(1)


def _room(rows: torch.Tensor, shard: Shard, scheme: Scheme, dtype: torch.dtype, layer: str) -> LowBitWeight:
    """Buffers for the whole weight, not initialized, of the layout that a block of zeros is given."""
    height, columns = scheme.block[0] if scheme.block else 1, rows.shape[1]
    small = materialize(rows.new_zeros((height, columns)), scheme, dtype, layer)
    total = math.prod(shard.shape[:-1])

    def room(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty((tensor.shape[0] * total // height, *tensor.shape[1:]))

    return replace(
        small,
        codes=room(small.codes),
        scale=None if small.scale is None else room(small.scale),
        shape=(total, columns),
    )
