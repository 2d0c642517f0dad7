"""FP8 products for CPUs without FP8 units, as fp32 products of the same e4m3 values.

On such CPUs vLLM 0.32 multiplies with `torch._scaled_mm`, which CPUs compute one element at a time:
512 tokens through a layer of 256 × 128 take 1.5 s. The fp32 product of two e4m3 values is exact, so
the only difference to that kernel is the order in which fp32 sums are taken. The weight is held in
fp32, four bytes per element. Remove this when vLLM or torch has a kernel for such CPUs that
multiplies in blocks.

Axes: N tokens, O output rows, I input columns.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear import ChannelWiseTorchFP8ScaledMMLinearKernel

_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Value of every e4m3 code, fp32 [256].

Values are looked up here, because torch's own conversion takes ten times as long on CPUs.
"""


class CPUFp32FP8ScaledMMLinearKernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
    """vLLM's kernel whose product of e4m3 values is computed in fp32; the rest is unchanged."""

    def get_output_padding(self) -> int | None:
        """Return None, because padded rows would not be faster here (vLLM's hook)."""
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert the loaded weight, e4m3 [I, O], to fp32 (vLLM's hook)."""
        super().process_weights_after_loading(layer)
        name = self.layer_param_names[0]
        values = decoded(getattr(layer, name).t()).t()
        setattr(layer, name, nn.Parameter(values, requires_grad=False))

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[Any],
    ) -> torch.Tensor:
        """Multiply, apply the scales and add the bias (vLLM's hook).

        A: e4m3 [N, I]. B: e4m3 values in fp32 [I, O]. As: fp32 [N, 1]. Bs: fp32 [O, 1].
        """
        output = fp32_product(decoded(A), B.t()).mul_(As).mul_(Bs.t())
        return (output if bias is None else output + bias).to(out_dtype).view(*output_shape)


def fp32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x, fp32 [N, I], with a weight, fp32 [O, I]; returns fp32 [N, O].

    A row has the same bits for every N.
    """
    # oneDNN multiplies. MKL, which torch uses for `@`, sums few rows (on some CPUs up to 128) in
    # another order than many, so decoded sequences would differ from what the learner scores.
    # oneDNN has another order for a single row only, which is therefore padded to two. On rows that
    # are not contiguous it takes a thousand times as long.
    rows = x if len(x) > 1 else nn.functional.pad(x, (0, 0, 0, 1))
    output = torch.ops.mkldnn._linear_pointwise(
        rows.contiguous(), weight.contiguous(), None, "none", [], ""
    )
    return output[: len(x)]


def decoded(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of e4m3 codes of any shape, fp32."""
    index = codes.contiguous().view(torch.uint8).flatten().int()
    return _VALUES.index_select(0, index).view(codes.shape)
