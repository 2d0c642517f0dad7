"""Activation codes by the engine's own operators, if the learner can call them."""

import torch
from compressed_tensors.quantization import QuantizationStrategy

from qarl.quant.materialize.activations import LowBitActivation, quantize_activation
from qarl.quant.runtime.libraries import has_vllm
from qarl.quant.schemes import Scheme, is_integer


def multiplied_activation(x: torch.Tensor, scheme: Scheme, ranks: int = 1) -> LowBitActivation:
    """Return the codes that the scheme's kernel multiplies for x, compute dtype [N, I].

    ranks: number of ranks that each quantize as many columns. A token then has as many scales.

    On CUDA, int8 and fp8 with a scale per token use vLLM's operators. These divide, whereas the
    operators for CPUs multiply with a reciprocal, so a few codes differ. On other devices and for
    other schemes the formulas are those of `quantize_activation`.

    Source: vLLM 0.32, `_custom_ops`.
    """
    args = scheme.activations
    if args is None or args.strategy != QuantizationStrategy.TOKEN:
        return quantize_activation(x, scheme)  # groups lie within a rank
    if ranks > 1:
        parts = multiplied_activation(x.reshape(-1, x.shape[-1] // ranks), scheme)
        return LowBitActivation(*(tensor.reshape(len(x), -1) for tensor in parts.tensors))
    if not x.is_cuda or not has_vllm():
        return quantize_activation(x, scheme)
    from vllm import _custom_ops as ops

    x = x.contiguous()
    if not is_integer(args):
        return LowBitActivation(*ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True))
    codes, scale, zero_point = ops.scaled_int8_quant(x, symmetric=bool(args.symmetric))
    if zero_point is not None:
        zero_point = zero_point.to(torch.float32)
    return LowBitActivation(codes, scale, zero_point)
