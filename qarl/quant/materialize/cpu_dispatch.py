"""Choose the code that materializes a weight: compiled loops if available, else torch's operators.

| masters | integer, fp8 per row | other schemes |
|---|---|---|
| fp32 or bf16 on a CPU, with numba | one pass, `cpu_loops` | torch's operators |
| fp16 on a CPU | torch's operators | torch's operators |
| on CUDA | the same operators through torch.compile (Triton) | torch's operators |

All give the same bits. torch's operators need scratch memory of one layer's size. `materializer`
makes the choice, and the start-up audit prints it.

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
"""Integer dtype in which masters are passed as bits, because numpy and numba have no bfloat16."""

_STORED = {
    torch.float32: (32, torch.uint32),
    torch.bfloat16: (0, torch.uint16),
    torch.float16: (16, torch.uint16),
}
"""Dtype of scales → its number in `cpu_loops._as_stored`, and the dtype of its bits."""

_THREAD_ELEMENTS = 1 << 17
"""Number of weights that is worth handing to a thread: about 0.05 ms of work."""


class Backend(Enum):
    """Code that materializes a weight; the value is shown to the user."""

    CAST = "cast"
    NUMBA = "fused numba"
    COMPILED = "torch.compile"
    TORCH = "torch"


@dataclass(frozen=True)
class Materializer:
    """Code that materializes weights, and why it is not a faster one."""

    backend: Backend
    """The code that runs."""
    reason: str = ""
    """Why the faster code for this scheme cannot run here; "" if there is none or it runs."""

    def __str__(self) -> str:
        return f"{self.backend.value} ({self.reason})" if self.reason else self.backend.value


def materializer(scheme: Scheme, master: torch.dtype, device: torch.device) -> Materializer:
    """Return what materializes weights of a scheme from masters of that dtype on that device."""
    args = scheme.weights
    if args is None:
        return Materializer(Backend.CAST)
    one_pass = is_integer(args) or (args.num_bits == 8 and scheme.block is None)
    if not one_pass or device.type not in ("cpu", "cuda"):
        return Materializer(Backend.TORCH)
    fast = Backend.COMPILED if device.type == "cuda" else Backend.NUMBA
    if device.type == "cuda":
        missing = compiler_missing("cuda")
    elif master not in _MASTER_BITS:
        name = str(master).removeprefix("torch.")
        missing = f"the compiled loops take float32 and bfloat16 masters, not {name}"
    else:
        missing = numba_missing()
    return Materializer(fast) if missing is None else Materializer(Backend.TORCH, missing)


@functools.cache
def numba_missing() -> str | None:
    """Return why the compiled CPU loops cannot be used, or None if they can.

    Imports numba, which takes half a second.
    """
    try:
        import qarl.quant.materialize.cpu_loops  # noqa: F401
    except ImportError as error:  # numba is not installed, or does not support this numpy
        return f"numba cannot be imported: {error}"
    return None


def quantize_on_cpu(
    weight: torch.Tensor,
    into: LowBitWeight,
    dtype: torch.dtype,
    layer: str,
    kept: torch.Tensor | None = None,
) -> None:
    """Quantize a master with the compiled loops.

    Raises the `PrecisionError`s of `check_scale`, which name `layer`; the buffers are then partly
    written.

    Args:
        weight: master, fp32 or bf16 [O, I].
        into: weight whose buffers are overwritten, and whose scheme is used.
        dtype: compute dtype, in which scales are stored.
        layer: name of the layer, for error messages.
        kept: scales to use, in `dtype` [O, Q]. Default: computed from the extremes.
    """
    from qarl.quant.materialize.cpu_loops import quantize_rows

    assert into.scale is not None
    args = into.scheme.weights
    rows, columns = into.shape
    assert args is not None
    stored, scale_bits = _STORED[dtype]
    if is_integer(args):
        low, high, half_range = integer_range(args.num_bits)
        kind = 4 if args.num_bits == 4 and into.scheme.packs_integers else 8
    else:
        low = -FP8_MAX
        high = half_range = FP8_MAX
        kind = 0
    # Packed codes are stored unsigned.
    offset = -low if into.scheme.packs_integers else 0
    master = weight.contiguous().view(_MASTER_BITS[weight.dtype]).numpy()
    if kept is not None:
        into.scale.copy_(kept)
    scales = into.scale.view(scale_bits).numpy()
    codes = into.codes.view(torch.uint32 if kind == 4 else torch.uint8).numpy()
    epsilon = torch.finfo(weight.dtype).eps
    numbers = [np.float32(number) for number in (epsilon, half_range, low, high, offset)]
    group = into.scheme.group_size or columns

    def quantize_part(start: int, stop: int) -> bool:
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

    rows_per_thread = -(-_THREAD_ELEMENTS // columns)
    if not all(in_threads(quantize_part, rows, at_least=rows_per_thread)):
        # A part was refused: raise the error that torch's operators raise for it.
        largest = absmax(weight.reshape(rows, -1, group))
        scale = stored_scale(largest, half_range, dtype) if kept is None else kept
        check_scale(largest, scale, layer)
        raise AssertionError(
            f"layer {layer!r}: refused by the compiled loop, accepted by torch's operators"
        )
