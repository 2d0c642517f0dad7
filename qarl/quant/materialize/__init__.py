"""Quantize master weights to low-bit codes and scales, laid out as in compressed-tensors and vLLM.

The arithmetic is that of compressed-tensors' `calculate_qparams`, `generate_gparam` and its
compressors, bit for bit (tests/quant/test_materialize.py compares them). Codes are computed with
the *stored* scale, so neither learner nor engine rounds again.

- `weight`: `LowBitWeight`, the result.
- `scales`: absolute maxima, and scales stored in the compute dtype.
- `integer`: int4 and int8 codes, with a scale per row or quantization group.
- `fp8`: e4m3 codes, with a scale per row or block.
- `fp4`: e2m1 codes, with e4m3 scales under a tensor-wide scale (NVFP4) or power-of-two scales
  (MXFP4).
- `cpu_dispatch`: choice of the code that runs; some schemes take one compiled pass.
- `cpu_loops`: the compiled pass on CPUs.
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from compressed_tensors.quantization import QuantizationStrategy

from qarl.quant.materialize import fp4, fp8, integer
from qarl.quant.materialize.cpu_dispatch import (
    Backend,
    Materializer,
    materializer,
    quantize_on_cpu,
)
from qarl.quant.materialize.scales import check_scale, finite_absmax, stored_scale
from qarl.quant.materialize.weight import LowBitWeight, empty
from qarl.quant.runtime.compile import compiled
from qarl.quant.runtime.shards import Shard
from qarl.quant.schemes import FP8_MAX, Scheme, is_integer

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

    With a shard this is a collective call: every process returns the full weight, with the bits
    that one process would compute from the full master.

    Args:
        weight: master, fp32, bf16 or fp16 [O, I]; with a shard, this process's rows of it.
        scheme: scheme of the result.
        dtype: compute dtype; scales of integer and fp8 codes are stored in it.
        layer: name of the layer, for error messages.
        fused: masters of the layers that the engine multiplies together with this one
            (`quant.layers.stack.fuse_scales`). A scheme with a tensor-wide scale computes it over
            all of them. With a shard, this process's rows of each.
        out: earlier result for the same scheme, shape and dtypes. Its buffers are overwritten and
            returned, so it, its views and every stream made of them then hold the new weight.
            Full in every process.
        scale: scales of integer codes, [O, Q] in `dtype`, positive, full in every process; codes
            beyond their range are clamped (docs/guide/scales.md). Default: scales computed from
            the weight's extremes.
        shard: rows that each process has. Default: this process has the full weight.

    Raises:
        SchemeError: the scheme cannot hold the weight's shape, or is fp4 and the master is fp16.
        PrecisionError: the weight is not finite, or its scale overflows `dtype`. With a shard it
            may be raised only by the process whose rows are refused; `out` is not usable
            afterwards.
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
    if out is None:  # a result for the same shape has passed this check
        scheme.check_layer(layer, shape)
    if scale is not None:
        assert is_integer(scheme.weights), (
            f"layer {layer!r}: scales of {scheme.name!r} cannot be given"
        )
        assert scale.dtype == dtype, (
            f"layer {layer!r}: scales in {scale.dtype} are not those that {dtype} stores"
        )
    backend = materializer(scheme, weight.dtype, weight.device).backend
    if backend is Backend.NUMBA:
        out = out or empty(scheme, shape, dtype)
        quantize_on_cpu(weight, out, dtype, layer, scale)
        return out
    quantized = by_operators(
        weight, scheme, dtype, layer, fused, backend is Backend.COMPILED, scale
    )
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
    """Quantize this process's rows into the full weight's buffers, then gather the other rows."""
    if scheme.fuses_scales:
        fused = (_global_absmax((rows, *fused)),)
    full = out or _empty_full_weight(rows, shard, scheme, dtype, layer)
    # The edges count rows of the shard's first axis, which are experts if the master is a stack.
    own_edges = shard.edges[shard.rank : shard.rank + 2]
    start, stop = (edge * full.shape[0] // shard.shape[0] for edge in own_edges)
    if scheme.block is not None:
        scheme.check_layer(layer, full.shape)
        _quantize_blocks(rows, start, full, dtype, layer)
        shard.gather(full.codes)
        return full
    if start < stop:
        own_scale = None if scale is None else shard.rows(scale)
        materialize(rows, scheme, dtype, layer, fused, full.rows(start, stop), own_scale)
    for tensor in full.buffers():
        shard.gather(tensor)
    return full


def _quantize_blocks(
    rows: torch.Tensor, start: int, full: LowBitWeight, dtype: torch.dtype, layer: str
) -> None:
    """Write this process's codes and all scales of a weight whose blocks processes may share.

    A block's largest magnitude is a maximum over processes, so any rows can be quantized. A
    collective call.

    rows: this process's rows, which begin with row `start` of the weight.
    """
    assert full.scheme.block is not None
    assert full.scale is not None
    height, columns = full.scheme.block
    maxima = rows.new_zeros((full.shape[0], full.scale.shape[1]))
    own = slice(start, start + len(rows))
    if len(rows):
        maxima[own] = fp8.row_maxima(rows, columns)
    largest = _over_processes(maxima.unflatten(0, (-1, height)).amax(dim=1))
    scale = stored_scale(largest, FP8_MAX, dtype)
    check_scale(largest, scale, layer)
    full.scale.copy_(scale)
    full.codes[own] = fp8.encode(rows, scale.repeat_interleave(height, dim=0)[own])


def _global_absmax(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the largest magnitude in all processes' rows, [1]; infinity if one of them has a NaN.

    A collective call.
    """
    maxima = [weight.abs().amax() for weight in weights if weight.numel()]
    largest = torch.stack(maxima).amax() if maxima else weights[0].new_zeros(())
    return _over_processes(largest).reshape(1)


def _over_processes(maxima: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each magnitude over all processes; infinity for a NaN.

    A collective call.
    """
    # A maximum over processes drops a NaN on some backends.
    largest = torch.where(maxima.isnan(), torch.inf, maxima).to(torch.float32)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.to(maxima.dtype)


def _empty_full_weight(
    rows: torch.Tensor, shard: Shard, scheme: Scheme, dtype: torch.dtype, layer: str
) -> LowBitWeight:
    """Return uninitialized buffers for the full weight.

    Their layout is found by quantizing one block of zeros.
    """
    height = scheme.block[0] if scheme.block else 1
    columns = rows.shape[1]
    small = materialize(rows.new_zeros((height, columns)), scheme, dtype, layer)
    total = math.prod(shard.shape[:-1])

    def enlarged(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty((tensor.shape[0] * total // height, *tensor.shape[1:]))

    return replace(
        small,
        codes=enlarged(small.codes),
        scale=None if small.scale is None else enlarged(small.scale),
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
    """Quantize a weight with torch's operators; see `materialize`.

    compiles: run integer and fp8 schemes, which take one pass, through torch.compile.
    """
    args = scheme.weights
    shape = (weight.shape[0], weight.shape[1])
    assert args is not None
    if args.num_bits == 4 and not is_integer(args):
        fp4.check_master(weight, scheme.name, layer)
        fp4.check_range(weight, dtype, layer)
        if args.strategy == QuantizationStrategy.TENSOR_GROUP:
            maxima = [finite_absmax(w.detach().flatten(), layer) for w in (weight, *fused)]
            absmax = torch.stack(maxima).amax()
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
        block = scheme.block or (1, shape[1])
        codes, stored, absmax = quantize(weight, *block, dtype)
    check_scale(absmax, stored, layer)
    return LowBitWeight(scheme, codes, stored, shape)
