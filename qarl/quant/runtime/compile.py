"""torch.compile for passes over tensors, rounding as torch's own operators do."""

import functools
import os
import shutil
from collections.abc import Callable, Hashable
from typing import Any

import torch

_EXACT: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""What makes TorchInductor round as torch's operators do: bfloat16 between operators, divisions,
subnormals.
"""


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a function of tensors and constants, for every shape at once. Sums may have
    another order.

    Each combination of dtypes, numbers of axes and constants is compiled apart: torch gives up a
    function that was compiled for the eighth time.
    """
    compile_: Any = torch.compile  # whose overloads leave `isolate_recompiles` out
    variants: dict[Hashable, Callable[..., Any]] = {}

    def call(*arguments: Any) -> Any:
        kind = tuple((a.dtype, a.ndim) if isinstance(a, torch.Tensor) else a for a in arguments)
        if kind not in variants:
            variants[kind] = compile_(
                function, fullgraph=True, isolate_recompiles=True, options=_EXACT
            )
        return variants[kind](*arguments)

    return call


def compiler_missing(device: str) -> str | None:
    """Why nothing can be compiled for a device type; None where it can."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE is set"
    if device == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"there is no C++ compiler {compiler!r}"
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None
