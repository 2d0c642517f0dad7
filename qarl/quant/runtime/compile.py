"""torch.compile with the rounding of torch's own operators."""

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
"""Options that make TorchInductor round as torch's operators do: bfloat16 between operators,
divisions, subnormals.
"""


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors and constants with torch.compile, for all shapes.

    The compiled function rounds as the original, but sums may be taken in another order. Each
    combination of dtypes, numbers of axes and constants is compiled separately, because torch stops
    compiling a function that it has compiled eight times.
    """
    compile_: Any = torch.compile  # Any, because its overloads lack `isolate_recompiles`
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
    """Return why nothing can be compiled for a device type, or None if it can."""
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
