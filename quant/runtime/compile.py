"""torch.compile for passes over tensors, rounding as torch's own operators do."""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

_EXACT: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""What makes TorchInductor round as torch's operators do: bfloat16 between operators, divisions, subnormals."""


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a function of tensors, for every shape at once. Sums may be added up in another order."""
    return torch.compile(function, dynamic=True, fullgraph=True, options=_EXACT)


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
