"""How a low-bit product is computed. Each module makes `LowBitMatmul`s from a `LowBitWeight`:

`vllm`       the layer object vLLM itself builds for that scheme, shape and platform
`torch`      torch's own low-bit products
`reference`  dequantize, then multiply in the compute dtype (fake-quant arithmetic)
`plain`      the master cast to the compute dtype, nothing quantized (the unaligned baseline)
"""

from qarl.quant.kernels.base import KernelError, KernelFactory, LowBitMatmul
from qarl.quant.kernels.choose import KERNELS, make_factory

__all__ = ["KERNELS", "KernelError", "KernelFactory", "LowBitMatmul", "make_factory"]
