"""Master weight → low-bit codes and scales, in the layout compressed-tensors checkpoints and vLLM
use.

The arithmetic is that of compressed-tensors' `calculate_qparams`, `generate_gparam` and its
compressors, bit for bit (tests/quant/test_materialize.py holds them together). Codes are computed
with the *stored* scale, so neither learner nor engine rounds again. One file a kind of code:

`weight`    what comes out: `LowBitWeight` `scales`    absolute maxima, and scales stored in the
compute dtype `integer`   int4 and int8, a scale a row or quantization group `fp8`       e4m3, a
scale a row or block `fp4`       e2m1 with e4m3 scales under a tensor-wide one (NVFP4), or with
power-of-two scales (MXFP4)

`cpu_dispatch` says which of them run as one compiled pass, and where; `cpu_loops` is that pass on
CPUs.
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from compressed_tensors.quantization import QuantizationStrategy

from qarl.quant.materialize import fp4, fp8, integer
from qarl.quant.materialize.cpu_dispatch import (
    Materializer,
    Way,
    materializer,
    quantize_on_cpu,
)
from qarl.quant.materialize.scales import check_scale, finite_absmax
from qarl.quant.materialize.weight import LowBitWeight, empty
from qarl.quant.runtime.compile import compiled
from qarl.quant.runtime.shards import Shard
from qarl.quant.schemes import Scheme, is_integer

__all__ = [
    "LowBitWeight",
    "Materializer",
    "by_operators",
    "materialize",
    "materializer",
]


@torch.no_grad()
def materialize(
    weight: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    layer: str = "weight",
    fused: tuple[torch.Tensor, ...] = (),
    out: LowBitWeight | None = None,
    scale: torch.Tensor | None = None,
    shard: Shard | None = None,
) -> LowBitWeight:
    """Quantize one master weight.

    weight: fp32, bf16 or fp16 [O, I], or with a shard this process's rows of it. dtype: compute
    dtype, the one scales of integer and fp8 codes are stored in. layer: name for error messages.
    fused: masters of the layers the engine multiplies together with this one
    (`quant.layers.stack.fuse_scales`); a scheme with a tensor-wide scale computes it over all of
    them. out: an earlier result for the same scheme, shape and dtypes, whose buffers are written
    again and returned: it, its views and every stream that was made of them then hold the new
    weight. scale: for integer codes, scales to use instead of those of the weight's extremes, [O,
    Q] in `dtype`, positive; codes beyond their range are clamped (docs/guide/scales.md). shard:
    which rows each process has. The result is that of the whole weight, bit for bit, in every
    process; `fused` is then this process's rows of each, `out` and `scale` are whole, and all
    processes come here together. Raises `SchemeError` for a shape the scheme cannot hold and for
    fp4 from fp16 masters, `PrecisionError` for weights that are not finite or whose scale overflows
    `dtype`, in the process whose rows are refused; `out` is not usable after that.
    """
    weight = weight.detach()
    if shard is not None:
        return _in_all_processes(weight, shard, scheme, dtype, layer, fused, out, scale)
    shape = (weight.shape[0], weight.shape[1])
    if scheme.weights is None:
        out = out or LowBitWeight(
            scheme, torch.empty(shape, dtype=dtype, device=weight.device), None, shape
        )
        out.codes.copy_(weight)
        return out
    scheme.check_layer(layer, shape)
    if scale is not None:
        assert is_integer(scheme.weights), (
            f"layer {layer!r}: scales of {scheme.name!r} cannot be given"
        )
        assert scale.dtype == dtype, (
            f"layer {layer!r}: scales in {scale.dtype} are not those that {dtype} stores"
        )
    way = materializer(scheme, weight.dtype, weight.device).way
    if way is Way.NUMBA:
        out = out or empty(scheme, shape, dtype)
        quantize_on_cpu(weight, out, dtype, layer, scale)
        return out
    quantized = by_operators(weight, scheme, dtype, layer, fused, way is Way.COMPILED, scale)
    return quantized if out is None else out.overwrite(quantized)


def _in_all_processes(
    rows: torch.Tensor,
    shard: Shard,
    scheme: Scheme,
    dtype: torch.dtype,
    layer: str,
    fused: tuple[torch.Tensor, ...],
    out: LowBitWeight | None,
    scale: torch.Tensor | None,
) -> LowBitWeight:
    """Quantize this process's rows into the whole weight's buffers, and have the others' from
    them.
    """
    if scheme.fuses_scales:
        fused = (_absmax_of_all((rows, *fused)),)
    whole = out or _room(rows, shard, scheme, dtype, layer)
    start, stop = (
        edge * whole.shape[0] // shard.shape[0] for edge in shard.edges[shard.rank : shard.rank + 2]
    )
    if start < stop:
        kept = None if scale is None else shard.rows(scale)
        materialize(rows, scheme, dtype, layer, fused, whole.rows(start, stop), kept)
    for tensor in whole.buffers():
        shard.gather(tensor)
    return whole


def _absmax_of_all(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The largest magnitude of all processes' rows, [1]; NaN where one has it."""
    largest = [weight.abs().amax() for weight in weights if weight.numel()]
    here = (
        torch.stack(largest).amax().to(torch.float32)
        if largest
        else weights[0].new_zeros((), dtype=torch.float32)
    )
    # A maximum over processes drops a NaN on some backends.
    here = torch.where(here.isnan(), torch.inf, here)
    dist.all_reduce(here, dist.ReduceOp.MAX)
    return here.to(weights[0].dtype).reshape(1)


def _room(
    rows: torch.Tensor, shard: Shard, scheme: Scheme, dtype: torch.dtype, layer: str
) -> LowBitWeight:
    """Buffers for the whole weight, not initialized, of the layout that a block of zeros is
    given.
    """
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


def by_operators(
    weight: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    layer: str,
    fused: tuple[torch.Tensor, ...] = (),
    compiles: bool = False,
    scale: torch.Tensor | None = None,
) -> LowBitWeight:
    """`materialize` by torch's operators, through torch.compile where asked and where one pass
    makes all.
    """
    args, shape = scheme.weights, (weight.shape[0], weight.shape[1])
    assert args is not None
    if args.num_bits == 4 and not is_integer(args):
        fp4.check_master(weight, scheme.name, layer)
        fp4.check_range(weight, dtype, layer)
        if args.strategy == QuantizationStrategy.TENSOR_GROUP:
            absmax = torch.stack(
                [finite_absmax(w.detach().flatten(), layer) for w in (weight, *fused)]
            ).amax()
            codes, stored, global_scale = fp4.quantize_nvfp4(weight, scheme, absmax)
            return LowBitWeight(
                scheme=scheme,
                codes=codes,
                scale=stored,
                shape=shape,
                global_scale=global_scale,
            )
        codes, stored = fp4.quantize_mxfp4(weight, scheme, layer)
        return LowBitWeight(scheme, codes, stored, shape)
    if is_integer(args):
        quantize = compiled(integer.quantize) if compiles else integer.quantize
        columns = scheme.group_size or shape[1]
        codes, stored, absmax = quantize(
            weight, args.num_bits, columns, scheme.packs_integers, dtype, scale
        )
    else:
        quantize = compiled(fp8.quantize) if compiles else fp8.quantize
        codes, stored, absmax = quantize(weight, *(scheme.block or (1, shape[1])), dtype)
    check_scale(absmax, stored, layer)
    return LowBitWeight(scheme, codes, stored, shape)
