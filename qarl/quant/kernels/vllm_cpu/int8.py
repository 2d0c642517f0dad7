"""W8A8 products for CPUs with AMX in every dtype and shape, and exact ones for CPUs without VNNI.

With AMX, vLLM 0.32 uses a kernel that is complete only for bfloat16 and a multiple of 32 output
rows. float16 ends the process, because "scalar path not implemented" is thrown out of a parallel
region. float32 and other shapes raise. vLLM's kernel for other CPUs, oneDNN's, supports all of
these, and gives the same bits in bfloat16, but slower. It takes a matrix of rows only, no batches
of them. Remove this when vLLM's `CPUInt8ScaledMMLinearKernel` chooses its kernel by dtype and
shape.

Without VNNI, oneDNN adds two products of 8-bit codes in 16 bits, which overflows: a small layer is
off by 3 %. Here codes are held in fp32, four bytes per weight, and multiplied in fp32, exactly.
Remove this when oneDNN's sums are exact.

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
"""Output rows of a block of vLLM's AMX kernel."""
_EXACT = 1024
"""Number of columns whose products of 8-bit codes add up to at most 2^24, exactly in fp32."""


class CPUInt8ScaledMMAnyDtypeKernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's AMX product for the layers that it supports, vLLM's oneDNN product for the others."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the loaded weight [O, I] for the product that will multiply it (vLLM's hook)."""
        rows = getattr(layer, self.layer_param_names[0]).shape[0]
        if layer.params_dtype == torch.bfloat16 and rows % _ROWS == 0:
            super().process_weights_after_loading(layer)
        else:
            self.linear_method = self._apply_weights_onednn
            self.process_weights_for_onednn(layer)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply x, compute dtype [..., I]; returns compute dtype [..., O] (vLLM's hook)."""
        output = super().apply_weights(layer, x.flatten(0, -2), bias)
        return output.unflatten(0, x.shape[:-1])


class CPUInt8ScaledMMFp32Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's kernel with the product in fp32, for dynamically quantized, symmetric inputs."""

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether the kernel supports such a layer, and the reason if not (vLLM's hook).

        It refuses other layers, because oneDNN's sums of them would be wrong.
        """
        if c.is_static_input_scheme or not (c.input_symmetric and c.is_channelwise):
            reason = "without VNNI int8 has to be symmetric, per channel and dynamic per token"
            return False, reason
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert the loaded codes, int8 [O, I], to fp32 (vLLM's hook)."""
        self.linear_method = self._apply_in_fp32
        name = self.layer_param_names[0]
        setattr(layer, name, nn.Parameter(getattr(layer, name).float(), requires_grad=False))

    def _apply_in_fp32(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply x, compute dtype [..., I]; returns compute dtype [..., O]."""
        codes, scale, *_ = self._get_layer_params(layer)
        rows, row_scale, _ = ops.onednn_scaled_int8_quant(x.flatten(0, -2), None, None, True)
        # Partial sums are exact in fp32; their total, which may not be, is taken in int32.
        parts = zip(rows.float().split(_EXACT, 1), codes.split(_EXACT, 1), strict=True)
        total: Any = sum(fp32_product(part, weight).int() for part, weight in parts)
        # The weight's scale first, as in oneDNN's product and in CUTLASS's.
        output = total.float().mul_(scale.t()).mul_(row_scale)
        output = output if bias is None else output + bias
        return output.to(x.dtype).unflatten(0, x.shape[:-1])
