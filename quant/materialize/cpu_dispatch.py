"""Which code materializes a weight: compiled loops where there are some, torch's operators everywhere else.

| masters | integer, fp8 per row | other schemes |
|---|---|---|
| fp32 or bf16 on a CPU, with numba | one pass, `fused_cpu` | torch's operators, one layer's scratch |
| fp16 on a CPU | torch's operators | torch's operators |
| on CUDA | the same operators through torch.compile (Triton) | torch's operators |

All give the same bits. `materializer` says which one it is; the start-up audit and `qarl bench publish` print it.
Axes: O output rows, I input columns.
"""

import functools

import numpy as np
import torch

from quant.materialize.weight import LowBitWeight
from quant.runtime.compile import compiler_missing
from quant.runtime.thread_pool import in_threads
from quant.schemes import FP8_MAX, Scheme, is_integer

_MASTER_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}
_STORED = {torch.float32: (32, torch.uint32), torch.bfloat16: (0, torch.uint16), torch.float16: (16, torch.uint16)}
_THREAD_ELEMENTS = 1 << 17
"""Weights that are worth handing to a thread: about 0.05 ms of work."""


def materializer(scheme: Scheme, master: torch.dtype, device: torch.device) -> str:
    """What materializes weights of a scheme: "fused numba", "torch.compile", "torch" or, unquantized, "cast".

    "torch" says why, where a faster way exists but not here.
    """
    if scheme.weights is None:
        return "cast"
    if not _has_loop(scheme):
        return "torch"
    if device.type == "cuda":
        missing = compiler_missing("cuda")
        return "torch.compile" if missing is None else f"torch ({missing})"
    if device.type != "cpu":
        return "torch"
    if master not in _MASTER_BITS:
        return f"torch (the compiled loops take float32 and bfloat16 masters, not {str(master).removeprefix('torch.')})"
    return "fused numba" if numba_missing() is None else f"torch ({numba_missing()})"


@functools.cache
def numba_missing() -> str | None:
    """Why the compiled CPU loops cannot be used; None where they can. Imports numba, half a second."""
    try:
        import quant.materialize.cpu_loops  # noqa: F401
    except ImportError as error:  # not installed, or not for this numpy
        return f"numba cannot be imported: {error}"
    return None


def quantize_on_cpu(weight: torch.Tensor, into: LowBitWeight, dtype: torch.dtype) -> bool:
    """Quantize a master, fp32 or bf16 [O, I], into `into`'s buffers; scheme of those, dtype: compute dtype.

    Returns False, with the buffers partly written, where a weight is not finite or a scale is beyond `dtype`.
    """
    from quant.materialize.cpu_loops import quantize_rows

    assert into.scale is not None
    args, (rows, columns) = into.scheme.weights, into.shape
    assert args is not None
    stored, scale_bits = _STORED[dtype]
    kind, low, high, half_range = 0, -FP8_MAX, FP8_MAX, FP8_MAX
    if is_integer(args):
        low, high = -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1
        kind, half_range = (4 if args.num_bits == 4 and into.scheme.packs_integers else 8), (high - low) / 2
    offset = -low if into.scheme.packs_integers else 0
    master = weight.contiguous().view(_MASTER_BITS[weight.dtype]).numpy()
    scales = into.scale.view(scale_bits).numpy()
    codes = into.codes.view(torch.uint32 if kind == 4 else torch.uint8).numpy()
    epsilon = torch.finfo(weight.dtype).eps
    numbers = [np.float32(number) for number in (epsilon, half_range, low, high, offset)]
    group = into.scheme.group_size or columns

    def part(start: int, stop: int) -> bool:
        span = slice(start, stop)
        return quantize_rows(master[span], group, stored, *numbers, kind, scales[span], codes[span])

    return all(in_threads(part, rows, at_least=-(-_THREAD_ELEMENTS // columns)))


def _has_loop(scheme: Scheme) -> bool:
    args = scheme.weights
    return args is not None and (is_integer(args) or (args.num_bits == 8 and scheme.block is None))
