"""W8A8 products for CPUs with AMX in every compute dtype and shape.

vLLM 0.32 multiplies there with a kernel that is complete for bfloat16 and output rows in blocks of 32 alone. float16
ends the process: "scalar path not implemented" is thrown out of a parallel region. float32 and other shapes raise. The
kernel vLLM has for other CPUs, oneDNN's, takes all of them and gives the same bits in bfloat16, where it is slower.
Remove this when vLLM's `CPUInt8ScaledMMLinearKernel` chooses by dtype and rows.
"""

import torch
from torch import nn
from vllm.model_executor.kernels.linear import CPUInt8ScaledMMLinearKernel

_ROWS = 32


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
