"""The roofline: how long work must take at least, by the bytes it moves and the operations it computes.

What a machine can do is measured in the same process as the work, so that other processes slow both. Nothing is quicker
than the slower of the two parts, each at the measured speed of plain, large operations; a kernel that keeps to it has
nothing left to gain.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qarl.plan.shapes import Shapes
from qarl.quant.schemes import Scheme, is_integer

_COPIED_BYTES = 1 << 27
_PRODUCT_ROWS = 1536
_PRODUCT_ROWS_CUDA = 8192


@dataclass(frozen=True)
class Machine:
    """copy_bandwidth: bytes read and written a second by a plain copy. products: kind of operands ("bfloat16", "int8",
    "float8", …) → multiplications and additions a second of a large product."""

    copy_bandwidth: float
    products: dict[str, float]

    def speed(self, kind: str) -> float:
        """Of products of this kind; of bfloat16's where the machine has none of its own that was measured."""
        return self.products.get(kind) or self.products["bfloat16"]


@dataclass(frozen=True)
class Work:
    """bytes: that must be read or written. operations: multiplications and additions, by kind of operands."""

    bytes: float
    operations: dict[str, float]

    def seconds(self, machine: Machine) -> float:
        """The least it can take: moving and computing overlap perfectly, activations never leave the caches."""
        return max(self.bytes / machine.copy_bandwidth, self.computing(machine))

    def computing(self, machine: Machine) -> float:
        """Seconds of the operations alone."""
        return sum(count / machine.speed(kind) for kind, count in self.operations.items())


def product_kind(scheme: Scheme, dtype: torch.dtype) -> str:
    """What the scheme's kernels multiply: low-bit activations with low-bit weights, or both in the compute dtype."""
    args = scheme.activations
    if args is None:
        return str(dtype).removeprefix("torch.")
    return f"int{args.num_bits}" if is_integer(args) else f"float{args.num_bits}"


def decode_work(shapes: Shapes, scheme: Scheme, dtype: torch.dtype, batch: int, context: float) -> Work:
    """One decoding step: one more token for each of `batch` sequences of `context` tokens, on average."""
    cache = batch * (context + 1) * shapes.key_value_bytes(dtype.itemsize)
    attention = 4 * batch * context * shapes.layers * shapes.heads * shapes.head_dim
    return Work(
        shapes.bytes_read(scheme.name, dtype.itemsize, batch) + cache,
        _operations(shapes, scheme, dtype, batch, batch, attention),
    )


def prefill_work(shapes: Shapes, scheme: Scheme, dtype: torch.dtype, batch: int, context: int) -> Work:
    """Prompts of `batch` sequences, `context` tokens each, up to the logits of the token after them."""
    tokens = batch * context
    attention = 4 * batch * context * (context + 1) / 2 * shapes.layers * shapes.heads * shapes.head_dim
    return Work(
        shapes.bytes_read(scheme.name, dtype.itemsize, tokens) + tokens * shapes.key_value_bytes(dtype.itemsize),
        _operations(shapes, scheme, dtype, tokens, batch, attention),
    )


def _operations(
    shapes: Shapes, scheme: Scheme, dtype: torch.dtype, tokens: float, logits: float, attention: float
) -> dict[str, float]:
    """logits: how many tokens the output head is computed for."""
    low_bit, plain = product_kind(scheme, dtype), str(dtype).removeprefix("torch.")
    operations = {plain: 2 * tokens * shapes.router + 2 * logits * shapes.head + attention}
    operations[low_bit] = operations.get(low_bit, 0.0) + 2 * tokens * shapes.active
    return operations


def measure_machine(clock: Callable[[], float] = time.perf_counter) -> Machine:
    """Of the GPU in use, else of as many CPU cores as torch has threads; the best of a few repeats, by `clock`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * _COPIED_BYTES / _least_seconds(lambda: target.copy_(source), clock)
    rows = _PRODUCT_ROWS_CUDA if device.type == "cuda" else _PRODUCT_ROWS
    x = torch.randn(rows, rows, device=device)
    products = {}
    for kind, multiply in _products(x).items():
        try:
            products[kind] = 2 * rows**3 / _least_seconds(multiply, clock)
        except RuntimeError:  # no such product on this machine: it is not named, and its work counts as bfloat16's
            continue
    return Machine(copy, products)


def _products(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Kind → a large product. float8 on GPUs alone: on CPUs torch has none but a loop."""
    halves = {dtype: x.to(dtype) for dtype in (torch.bfloat16, torch.float16)}
    codes = x.mul(40).clamp(-100, 100).to(torch.int8)
    products: dict[str, Callable[[], object]] = {
        "float32": lambda: x @ x.t(),
        "bfloat16": lambda: halves[torch.bfloat16] @ halves[torch.bfloat16].t(),
        "float16": lambda: halves[torch.float16] @ halves[torch.float16].t(),
        "int8": lambda: torch._int_mm(codes, codes.t()),  # pyright: ignore[reportPrivateImportUsage]
    }
    if x.is_cuda:
        small, one = x.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        products["float8"] = lambda: multiply(small, small.t(), one, one, out_dtype=torch.bfloat16)
    return products


def _least_seconds(work: Callable[[], object], clock: Callable[[], float], repeats: int = 3) -> float:
    work()
    times = []
    for _ in range(repeats):
        synchronize()
        start = clock()
        work()
        synchronize()
        times.append(clock() - start)
    return min(times)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
