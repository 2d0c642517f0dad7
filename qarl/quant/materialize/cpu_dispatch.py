"""Which code materializes a weight: compiled loops where there are some, torch's operators
everywhere else.

| masters | integer, fp8 per row | other schemes |
|---|---|---|
| fp32 or bf16 on a CPU, with numba | one pass, `cpu_loops` | torch's operators, one layer's scratch
  |
| fp16 on a CPU | torch's operators | torch's operators |
| on CUDA | the same operators through torch.compile (Triton) | torch's operators |

All give the same bits. `materializer` says which one it is; the start-up audit prints it.
Axes: O output rows, I input columns.
"""

import functools
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from qarl.quant.materialize.integer import integer_range
from qarl.quant.materialize.scales import absmax, check_scale, stored_scale
from qarl.quant.materialize.weight import LowBitWeight
from qarl.quant.runtime.compile import compiler_missing
from qarl.quant.runtime.thread_pool import in_threads
from qarl.quant.schemes import FP8_MAX, Scheme, is_integer

_MASTER_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}
"""numpy and numba know no bfloat16: masters are handed over as their bits."""

_STORED = {
    torch.float32: (32, torch.uint32),
    torch.bfloat16: (0, torch.uint16),
    torch.float16: (16, torch.uint16),
}
"""Of scales: what `cpu_loops._as_stored` calls the dtype, and its bits."""

_THREAD_ELEMENTS = 1 << 17
"""Weights that are worth handing to a thread: about 0.05 ms of work."""


class Way(Enum):
    """How a weight is materialized; the value is what people are told."""

    CAST = "cast"
    NUMBA = "fused numba"
    COMPILED = "torch.compile"
    TORCH = "torch"


@dataclass(frozen=True)
class Materializer:
    """way: which code runs. reason: why no faster one does, where there is one elsewhere; else
    "".
    """

    way: Way
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.way.value} ({self.reason})" if self.reason else self.way.value


def materializer(scheme: Scheme, master: torch.dtype, device: torch.device) -> Materializer:
    """What materializes weights of a scheme, from masters of that dtype on that device."""
    if (args := scheme.weights) is None:
        return Materializer(Way.CAST)
    one_pass = is_integer(args) or (args.num_bits == 8 and scheme.block is None)
    if not one_pass or device.type not in ("cpu", "cuda"):
        return Materializer(Way.TORCH)
    if device.type == "cuda":
        missing, fast = compiler_missing("cuda"), Way.COMPILED
    elif master not in _MASTER_BITS:
        name = str(master).removeprefix("torch.")
        missing, fast = (
            f"the compiled loops take float32 and bfloat16 masters, not {name}",
            Way.NUMBA,
        )
    else:
        missing, fast = numba_missing(), Way.NUMBA
    return Materializer(fast) if missing is None else Materializer(Way.TORCH, missing)


@functools.cache
def numba_missing() -> str | None:
    """Why the compiled CPU loops cannot be used; None where they can. Imports numba, half a
    second.
    """
    try:
        import qarl.quant.materialize.cpu_loops  # noqa: F401
    except ImportError as error:  # not installed, or not for this numpy
        return f"numba cannot be imported: {error}"
    return None


def quantize_on_cpu(
    weight: torch.Tensor,
    into: LowBitWeight,
    dtype: torch.dtype,
    layer: str,
    kept: torch.Tensor | None = None,
) -> None:
    """Quantize a master, fp32 or bf16 [O, I], into `into`'s buffers; scheme of those, dtype:
    compute dtype. kept: scales to use, of that dtype [O, Q], else None.

    Raises the `PrecisionError`s of `check_scale`, naming `layer`, with the buffers partly written.
    """
    from qarl.quant.materialize.cpu_loops import quantize_rows

    assert into.scale is not None
    args, (rows, columns) = into.scheme.weights, into.shape
    assert args is not None
    stored, scale_bits = _STORED[dtype]
    kind, low, high, half_range = 0, -FP8_MAX, FP8_MAX, FP8_MAX
    if is_integer(args):
        low, high, half_range = integer_range(args.num_bits)
        kind = 4 if args.num_bits == 4 and into.scheme.packs_integers else 8
    offset = -low if into.scheme.packs_integers else 0
    master = weight.contiguous().view(_MASTER_BITS[weight.dtype]).numpy()
    if kept is not None:
        into.scale.copy_(kept)
    scales = into.scale.view(scale_bits).numpy()
    codes = into.codes.view(torch.uint32 if kind == 4 else torch.uint8).numpy()
    epsilon = torch.finfo(weight.dtype).eps
    numbers = [np.float32(number) for number in (epsilon, half_range, low, high, offset)]
    group = into.scheme.group_size or columns

    def part(start: int, stop: int) -> bool:
        span = slice(start, stop)
        return quantize_rows(
            master[span],
            group,
            stored,
            *numbers,
            kind,
            kept is not None,
            scales[span],
            codes[span],
        )

    if not all(in_threads(part, rows, at_least=-(-_THREAD_ELEMENTS // columns))):
        largest = absmax(weight.reshape(rows, -1, group))
        check_scale(
            largest,
            stored_scale(largest, half_range, dtype) if kept is None else kept,
            layer,
        )
        raise AssertionError(
            f"layer {layer!r}: refused by the compiled loop, accepted by torch's operators"
        )
