"""Master weight → low-bit codes and scales, in the layout compressed-tensors checkpoints and vLLM use.

The arithmetic is that of compressed-tensors' `calculate_qparams`, `generate_gparam` and its compressors, bit for bit
(tests/test_materialize.py holds them together). Codes are computed with the *stored* scale, so neither learner nor
engine rounds again. One file a kind of code:

`weight`    what comes out: `LowBitWeight`
`scales`    absolute maxima, and scales stored in the compute dtype
`integer`   int4 and int8, a scale a row or quantization group
`fp8`       e4m3, a scale a row or block
`fp4`       e2m1 with e4m3 scales under a tensor-wide one (NVFP4), or with power-of-two scales (MXFP4)
"""

import torch
from compressed_tensors.quantization import QuantizationStrategy

from quant.materialize import fp4, fp8, integer
from quant.materialize.scales import finite_absmax
from quant.materialize.weight import LowBitWeight
from quant.schemes import Scheme, is_integer

__all__ = ["LowBitWeight", "materialize"]


@torch.no_grad()
def materialize(
    weight: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    layer: str = "weight",
    fused: tuple[torch.Tensor, ...] = (),
) -> LowBitWeight:
    """Quantize one master weight.

    weight: fp32 or bf16 [O, I]. dtype: compute dtype, the one scales of integer and fp8 codes are stored in.
    layer: name for error messages. fused: masters of the layers the engine multiplies together with this one
    (`quant.linear.fuse_scales`); a scheme with a tensor-wide scale computes it over all of them.
    Raises `SchemeError` for a shape the scheme cannot hold, `ValueError` for weights that are not finite or whose scale
    overflows `dtype`.
    """
    shape = (weight.shape[0], weight.shape[1])
    weight = weight.detach()
    args = scheme.weights
    if args is None:
        return LowBitWeight(scheme, weight.to(dtype, copy=True), None, shape)
    scheme.check_layer(layer, shape)
    if is_integer(args):
        codes, scale = integer.quantize(weight, scheme, dtype, layer)
        return LowBitWeight(scheme, codes, scale, shape)
    if args.num_bits == 8:
        codes, scale = fp8.quantize(weight, scheme, dtype, layer)
        return LowBitWeight(scheme, codes, scale, shape)
    fp4.check_range(weight, dtype, layer)
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        absmax = torch.stack([finite_absmax(w.detach().flatten(), layer) for w in (weight, *fused)]).amax()
        codes, scale, global_scale = fp4.quantize_nvfp4(weight, scheme, absmax)
        return LowBitWeight(scheme, codes, scale, shape, global_scale)
    codes, scale = fp4.quantize_mxfp4(weight, scheme, layer)
    return LowBitWeight(scheme, codes, scale, shape)
