"""W8A8 products for CPUs with AMX in every compute dtype and shape, and for CPUs without VNNI in
whole sums.

vLLM 0.32 multiplies with AMX by a kernel that is complete for bfloat16 and output rows in blocks of
32 alone. float16 ends the process: "scalar path not implemented" is thrown out of a parallel
region. float32 and other shapes raise. The kernel vLLM has for other CPUs, oneDNN's, takes all of
them and gives the same bits in bfloat16, where it is slower. It takes rows alone, no batches of
them. Remove this when vLLM's `CPUInt8ScaledMMLinearKernel` chooses by that.

Without VNNI oneDNN adds two products of 8-bit codes in 16 bits, which overflow: a small layer is
off by 3 %. Here codes are held in fp32, four bytes a weight, and multiplied in fp32, exactly.
Remove it when oneDNN does so too.

Axes: N tokens, O output rows, I input columns.
"""

from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import (
    CPUInt8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)

from qarl.quant.kernels.vllm_cpu.fp8 import fp32_product

_ROWS = 32
_EXACT = 1024
"""Columns whose products of 8-bit codes add up to less than 2^24, in fp32 without rounding."""


class CPUInt8ScaledMMAnyDtypeKernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's kernel where its AMX product is complete, vLLM's oneDNN product elsewhere."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """vLLM's hook: pack the loaded weight [O, I] for the product that is to multiply it."""
        rows = getattr(layer, self.layer_param_names[0]).shape[0]
        if layer.params_dtype == torch.bfloat16 and rows % _ROWS == 0:
            super().process_weights_after_loading(layer)
        else:
            self.linear_method = self._apply_weights_onednn
            self.process_weights_for_onednn(layer)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """vLLM's hook. x: compute dtype [..., I] → compute dtype [..., O]."""
        return super().apply_weights(layer, x.flatten(0, -2), bias).unflatten(0, x.shape[:-1])


class CPUInt8ScaledMMFp32Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's kernel with its product of dynamically quantized, symmetric inputs in fp32."""

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """vLLM's hook: whether it multiplies such a layer, and else why not; oneDNN's sums would be
        wrong.
        """
        if c.is_static_input_scheme or not (c.input_symmetric and c.is_channelwise):
            return (
                False,
                "without VNNI int8 has to be symmetric, per channel and dynamic per token",
            )
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """vLLM's hook: hold the loaded codes, int8 [O, I], in fp32."""
        self.linear_method = self._apply_in_fp32
        name = self.layer_param_names[0]
        setattr(layer, name, nn.Parameter(getattr(layer, name).float(), requires_grad=False))

    def _apply_in_fp32(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: compute dtype [..., I] → compute dtype [..., O]."""
        codes, scale, *_ = self._get_layer_params(layer)
        rows, row_scale, _ = ops.onednn_scaled_int8_quant(x.flatten(0, -2), None, None, True)
        parts = zip(rows.float().split(_EXACT, 1), codes.split(_EXACT, 1), strict=True)
        total: Any = sum(fp32_product(part, weight).int() for part, weight in parts)
        output = total.float().mul_(row_scale).mul_(scale.t())
        output = output if bias is None else output + bias
        return output.to(x.dtype).unflatten(0, x.shape[:-1])
