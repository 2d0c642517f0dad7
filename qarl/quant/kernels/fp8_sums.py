"""Error of sums of fp8 products on NVIDIA GPUs.

A tensor core of compute capability 8.9 or 9.0 does not add fp8 products in fp32. It aligns 16 or 32
products and the running sum to the largest exponent among them, and cuts each off 13 bits below it.
So a sum over K columns is off by about 2^-13 of its terms' norm at each step, while a result in
bfloat16 is off by 2^-9 of itself. vLLM's kernels do not add partial sums in fp32, but for
`fp8-block`, which does so for every block.

`python -m benchmarks.fp8_sums` measures the error by an emulation, whose bits equal those of
mmaemu 0.1.0, which was made from recordings of an H100 PCIe and an RTX 4060. Nothing is known of
10.0, for which the same error is assumed.
"""

import math

import torch

from qarl.quant.schemes import Scheme

_ERROR = 0.24 * 2.0**-13
"""Error of a sum over K columns, divided by √K, relative to the root mean square of such sums.

Weights and activations are independent, which makes sums small beside their terms.
"""


def fp8_sum_error(scheme: Scheme, columns: int, device: torch.device) -> float:
    """Return the error of a product's sums relative to their size, both as root mean squares.

    It is 0.0 where sums are added in fp32 or in integers: on CPUs, and if activations are not e4m3.

    columns: input columns of the product; of several products in a row, their total.
    """
    activations = scheme.activations
    if device.type != "cuda" or activations is None:
        return 0.0
    if (activations.type, activations.num_bits) != ("float", 8):
        return 0.0
    return _ERROR * math.sqrt(min(columns, scheme.block[1]) if scheme.block else columns)
