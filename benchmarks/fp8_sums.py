"""`python -m benchmarks.fp8_sums`: error of fp8 sums on NVIDIA GPUs, emulated on a CPU.

Each product is summed as the tensor cores of an H100 (32 products at a time) or of compute
capability 8.9 (16) do it, and exactly. Shapes are those of real layers, values are drawn. Printed
is the error relative to the products' root mean square, of all, of the worst token (row of
activations) and of the worst channel (row of weights), beside what `qarl.quant.kernels.fp8_sums`
assumes.

Blind spots: vLLM's CUTLASS kernels themselves, and real activations.

Axes: N tokens, O output rows, K input columns.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import write_json
from qarl.quant.kernels.fp8_sums import fp8_sum_error
from qarl.quant.schemes import get_scheme
from qarl.report.record import record

E4M3 = torch.float8_e4m3fn
TERMS = {"9.0": 32, "8.9": 16}
"""Compute capability → products that one instruction adds."""
COLUMNS = (576, 1024, 2048, 3072, 4096, 6144, 12288, 29568)
"""Input columns of layers of SmolLM2-135M, Qwen3-0.6B to 8B and Qwen2.5-72B."""
INPUTS = ("normal", "gated", "outliers")
"""Kinds of activations: normal, SiLU of a normal value times another, and normal with every 97th
column 20 times as large.
"""
_KEPT_BITS = 13
_SMALLEST_EXPONENT = -6


def truncated_sums(x: torch.Tensor, weight: torch.Tensor, terms: int) -> torch.Tensor:
    """Return x · weightᵀ as tensor cores add it, float64 [N, O], before scales.

    Of each step's products and the running sum, every one is cut off toward zero 13 bits below the
    largest exponent of a factor pair or of the running sum; their total is cut off 13 bits below
    its own exponent.

    x, weight: e4m3 [N, K] and [O, K], K a multiple of `terms`.
    """
    a = x.double()
    b = weight.double()
    a_exponent, b_exponent = (_exponents(t, _SMALLEST_EXPONENT) for t in (a, b))
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], terms):
        part = slice(start, start + terms)
        pair_exponents = a_exponent[:, None, part] + b_exponent[None, :, part]
        largest = torch.maximum(pair_exponents.amax(-1), _exponents(total))
        unit = torch.exp2(largest.clamp_min(-132) - _KEPT_BITS)
        products = a[:, None, part] * b[None, :, part]
        added = (products / unit[..., None]).trunc().sum(-1) + (total / unit).trunc()
        total = added * unit
        own_unit = torch.exp2(_exponents(total).clamp_min(-900) - _KEPT_BITS)
        total = (total / own_unit).trunc() * own_unit
    return total


def _exponents(values: torch.Tensor, smallest: float = -1000.0) -> torch.Tensor:
    """Return ⌊log₂|v|⌋, at least `smallest`; far below for zeros."""
    exponents = (torch.frexp(values)[1] - 1).double().clamp_min(smallest)
    return exponents.where(values != 0, -1e5)


def draw(kind: str, columns: int, tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of activations and weights, e4m3, with a scale a token and a channel."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(tokens, columns, generator=generator)
    if kind == "gated":
        x = torch.nn.functional.silu(x) * torch.randn(tokens, columns, generator=generator)
    if kind == "outliers":
        x[:, ::97] *= 20
    weight = torch.randn(rows, columns, generator=generator)
    codes = [(t / (t.abs().amax(-1, keepdim=True) / 448)).to(E4M3) for t in (x, weight)]
    return codes[0], codes[1]


def relative_errors(x: torch.Tensor, weight: torch.Tensor, terms: int) -> dict[str, float]:
    """Return the error of sums by their root mean square: of all, worst token, worst channel."""
    exact = x.double() @ weight.double().T
    error = truncated_sums(x, weight, terms) - exact
    ratios = {
        name: (error.square().mean(axes) / exact.square().mean(axes)).sqrt().amax()
        for name, axes in (("all", (0, 1)), ("token", (1,)), ("channel", (0,)))
    }
    return {name: float(ratio) for name, ratio in ratios.items()}


def table() -> Iterator[dict[str, float | str]]:
    """Yield a row for each capability, number of columns and kind of activations."""
    for capability, terms in TERMS.items():
        for columns in COLUMNS:
            for kind in INPUTS:
                errors = relative_errors(*draw(kind, columns, 16, 64), terms)
                bound = fp8_sum_error(get_scheme("fp8"), columns, torch.device("cuda"))
                yield {
                    "capability": capability,
                    "columns": columns,
                    "activations": kind,
                    **errors,
                    "assumed": bound,
                }


def main() -> None:
    """Print the table, and write it as JSON if `--json` is set."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_sums", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    quiet_libraries()
    rows = []
    for row in table():
        rows.append(row)
        figures = "  ".join(f"{name} {row[name]:.2e}" for name in ("all", "token", "channel"))
        place = f"{row['capability']:4s} {row['columns']:6d} {row['activations']:9s}"
        print(f"{place} {figures}  assumed {row['assumed']:.2e}", flush=True)
    if arguments.json:
        write_json(str(arguments.json), record([], rows, "python -m benchmarks.fp8_sums"))


if __name__ == "__main__":
    main()
