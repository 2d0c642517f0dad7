"""Tests of the error that fp8 sums have on NVIDIA GPUs, by an emulation of their tensor cores.

Blind spot: vLLM's CUTLASS kernels, which no CPU can run.
"""

import math

import pytest
import torch

from benchmarks.fp8_sums import E4M3, INPUTS, TERMS, draw, relative_errors, truncated_sums
from qarl.quant.kernels.fp8_sums import fp8_sum_error
from qarl.quant.layers.context import LayerContext
from qarl.quant.schemes import SCHEMES, get_scheme

CUDA = torch.device("cuda")
HARDWARE = {
    "9.0": [[96384, 34536, -81736, 39452], [-147776, 154816, -87816, -800]],
    "8.9": [[96384, 34532, -81752, 39460], [-147776, 154832, -87824, -800]],
}
"""Sums of `pattern(2, …)` and `pattern(4, …)` by mmaemu 0.1.0, whose bits are an H100 PCIe's and an
RTX 4060's.
"""


def pattern(rows: int, step: int) -> torch.Tensor:
    """Return finite e4m3 values of all exponents, without a random generator, [rows, 192]."""
    codes = (torch.arange(rows * 192) * step % 251).to(torch.uint8)
    codes -= ((codes & 127) == 127).to(torch.uint8)  # the codes of NaN
    return codes.view(rows, 192).view(E4M3)


@pytest.mark.parametrize("capability", TERMS)
def test_emulated_sums_have_the_bits_of_recorded_hardware(capability: str):
    sums = truncated_sums(pattern(2, 7919), pattern(4, 104729), TERMS[capability])
    assert sums.tolist() == HARDWARE[capability]


@pytest.mark.parametrize("capability", TERMS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("columns", [1024, 3072])
def test_assumed_error_bounds_the_emulated_one_within_a_factor_of_two(
    columns: int, kind: str, capability: str
):
    """Contract: the floor's perturbation is as large as the tensor cores' error, and not far
    larger, so that a multiple of it neither refuses a right kernel nor hides a fault.
    """
    measured = relative_errors(*draw(kind, columns, 8, 48), TERMS[capability])["all"]
    assumed = fp8_sum_error(get_scheme("fp8"), columns, CUDA)
    assert measured < assumed < 2 * measured


def test_only_e4m3_activations_on_gpus_have_such_an_error():
    assert [s for s in SCHEMES if fp8_sum_error(get_scheme(s), 4096, CUDA)] == [
        "w4afp8",
        "fp8",
        "fp8-block",
    ]
    assert fp8_sum_error(get_scheme("fp8"), 4096, torch.device("cpu")) == 0.0


def test_blocks_are_added_in_fp32():
    errors = {fp8_sum_error(get_scheme("fp8-block"), columns, CUDA) for columns in (128, 4096)}
    assert len(errors) == 1


def test_another_rounding_has_the_error_of_fp8_sums(monkeypatch: pytest.MonkeyPatch):
    """Contract: the perturbation's size is that of rounding and of the sums' error together."""
    monkeypatch.setattr("qarl.quant.layers.context.fp8_sum_error", lambda *_: 0.01)
    context = LayerContext(torch.bfloat16, "reference")
    values = torch.ones(256, 256, dtype=torch.bfloat16)
    with context.other_roundings(seed=3):
        moved = context.rounded(values, get_scheme("fp8"), 4096)
    error = float((moved.float() - 1).square().mean().sqrt())
    assert error == pytest.approx(math.hypot(0.01, 2**-8 / math.sqrt(3)), rel=0.05)
