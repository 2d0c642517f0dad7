"""The smallest Triton kernel: where it compiles and runs, compiler, Python.h and driver are there. Not run on a GPU."""

# pyright: reportMissingImports=false
import torch
import triton
import triton.language as tl

_BLOCK = 128


@triton.jit
def _add(left, right, total, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(total + place, tl.load(left + place) + tl.load(right + place))


def adds() -> bool:
    """Whether the kernel's sum on the GPU is right."""
    left, right = (torch.arange(_BLOCK, device="cuda", dtype=torch.float32) for _ in range(2))
    total = torch.empty_like(left)
    _add[(1,)](left, right, total, BLOCK=_BLOCK)  # pyright: ignore[reportIndexIssue]
    return bool((total == left + right).all())
