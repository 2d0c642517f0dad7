"""The codes of activations as the engine's own operators make them, where the learner can call
those.
"""

import torch
from compressed_tensors.quantization import QuantizationStrategy

from qarl.quant.materialize.activations import LowBitActivation, quantize_activation
from qarl.quant.runtime.libraries import has_vllm
from qarl.quant.schemes import Scheme, is_integer


def multiplied_activation(x: torch.Tensor, scheme: Scheme) -> LowBitActivation:
    """What the scheme's kernel multiplies for x, compute dtype [N, I].

    On CUDA by vLLM's operators, for int8 and fp8 with a scale a token: they divide where those of
    CPUs multiply with a reciprocal, and a few codes differ. Elsewhere and for other schemes
    `quantize_activation`'s formulas. Source: vLLM 0.32, `_custom_ops`.
    """
    args = scheme.activations
    if not (
        x.is_cuda
        and has_vllm()
        and args is not None
        and args.strategy == QuantizationStrategy.TOKEN
    ):
        return quantize_activation(x, scheme)
    from vllm import _custom_ops as ops

    x = x.contiguous()
    if not is_integer(args):
        return LowBitActivation(*ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True))
    codes, scale, zero_point = ops.scaled_int8_quant(x, symmetric=bool(args.symmetric))
    return LowBitActivation(
        codes, scale, None if zero_point is None else zero_point.to(torch.float32)
    )
