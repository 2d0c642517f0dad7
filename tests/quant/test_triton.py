"""The Triton product under Triton's interpreter, on a CPU, against `reference`. The CPU lock leaves Triton out: vLLM
would choose other parts with it. To run this, with Triton 3.7.1 unpacked in FOLDER:

    PYTHONPATH=FOLDER TRITON_INTERPRET=1 python -m pytest tests/quant/test_triton.py
"""

import os
from importlib.util import find_spec

import pytest
import torch

if not find_spec("triton") or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1 from the start", allow_module_level=True)

from qarl.quant.kernels.plain import dequantized_matmul
from qarl.quant.kernels.triton_wna16 import triton_multiply
from qarl.quant.materialize import materialize
from qarl.quant.schemes import get_scheme
from tests.support.tensors import normal


@pytest.mark.parametrize("tokens", [1, 16, 17, 130])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w4a16-g64", "w4a16", "w4a16-channel", "w8a16"])
def test_the_product_is_the_references(scheme: str, tokens: int):
    """Contract: fp32 sums of exact codes, in float32 to the order of a sum; rows and tokens that fill no block."""
    weight = materialize(normal(72, 256, seed=1), get_scheme(scheme), torch.float32)
    x = normal(tokens, 256, seed=2)
    expected = dequantized_matmul(weight, None, torch.float32)(x)
    torch.testing.assert_close(triton_multiply("layer", weight)(x), expected, rtol=1e-5, atol=1e-4)
