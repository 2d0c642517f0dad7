"""CPU time of writing a w8a8 version, by part: codes, column sums, and oneDNN's own layout.

OMP_NUM_THREADS=1 python -m benchmarks.int8_packing

The figures are nanoseconds of CPU time per weight, from the fastest round, for the four matrices of
a layer of the model of 149 million parameters (`benchmarks/models.py`). The layout of unquantized
bfloat16 is measured as well.
"""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from vllm import _custom_ops as ops

from qarl.quant.materialize import materialize
from qarl.quant.schemes import get_scheme

_SHAPES = ((1536, 768), (768, 768), (4608, 768), (768, 2304))
"""Output rows and input columns of q, k and v, of o, of gate and up, and of down."""
_ROUNDS = 7
_CACHED = 32
"""Number of primitives per weight that vLLM's own layers let oneDNN cache."""


def nanoseconds(part: Callable[[], object], weights: int) -> float:
    """Return nanoseconds of CPU time per weight, from the fastest round."""
    seconds = []
    for _ in range(_ROUNDS):
        begun = time.process_time()
        part()
        seconds.append(time.process_time() - begun)
    return 1e9 * min(seconds) / weights


def main() -> None:
    """Measure and print one row for each shape."""
    scheme = get_scheme("w8a8")
    dtype = torch.bfloat16
    Console().print(
        "rows x columns: codes, sums, oneDNN's int8 layout, oneDNN's bfloat16 layout",
        highlight=False,
    )
    for rows, columns in _SHAPES:
        master = torch.randn(rows, columns)
        weight = materialize(master, scheme, dtype, "layer")
        assert weight.scale is not None
        codes = weight.codes
        scale = weight.scale.float()
        plain = master.to(dtype)
        parts = (
            lambda master=master, weight=weight: materialize(
                master, scheme, dtype, "layer", out=weight
            ),
            lambda codes=codes: codes.sum(1, dtype=torch.float32),
            lambda codes=codes, scale=scale: ops.create_onednn_scaled_mm(
                codes.t(), scale, dtype, True, False, _CACHED
            ),
            lambda plain=plain: ops.create_onednn_mm(plain.t(), _CACHED),
        )
        row = ", ".join(f"{nanoseconds(part, master.numel()):.2f}" for part in parts)
        Console().print(f"{rows} x {columns}: {row} ns", highlight=False)


if __name__ == "__main__":
    main()
