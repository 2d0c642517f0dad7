"""FP8 products for CPUs without FP8 units: fp32 products of the same e4m3 values.

vLLM 0.32 multiplies there with `torch._scaled_mm`, which CPUs compute one element at a time: 1.5 s
for 512 tokens through a layer of 256 × 128. The fp32 product of two e4m3 values is exact, so what
differs from that kernel is the order in which fp32 sums are taken. The weight is held in fp32, four
bytes an element. Remove this when vLLM or torch has a kernel for such CPUs that multiplies in
blocks.

Axes: N tokens, O output rows, I input columns.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear import ChannelWiseTorchFP8ScaledMMLinearKernel

_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""fp32 [256], of every e4m3 code; looked up, for torch's own conversion takes ten times as long on
CPUs.
"""


class CPUFp32FP8ScaledMMLinearKernel(ChannelWiseTorchFP8ScaledMMLinearKernel):
    """vLLM's kernel with its product of e4m3 values, and nothing else of it, in fp32."""

    def get_output_padding(self) -> int | None:
        """Whole rows are not quicker here."""
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """vLLM's hook: hold the loaded weight, e4m3 [I, O], in fp32."""
        super().process_weights_after_loading(layer)
        name = self.layer_param_names[0]
        setattr(
            layer,
            name,
            nn.Parameter(decoded(getattr(layer, name).t()).t(), requires_grad=False),
        )

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
        """vLLM's hook. A: e4m3 [N, I]; B: e4m3 values in fp32 [I, O]; As, Bs: fp32 [N, 1] and [O,
        1].
        """
        output = fp32_product(decoded(A), B.t()).mul_(As).mul_(Bs.t())
        return (output if bias is None else output + bias).to(out_dtype).view(*output_shape)


def fp32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: fp32 [N, I]; weight: fp32 [O, I] → fp32 [N, O], every row the same whatever N is."""
    # By oneDNN. MKL, which torch takes for `@`, adds up few rows in another order, on some CPUs up
    # to 128: sequences decoded would differ from what the learner scores. oneDNN has another order
    # for one row alone, and takes a thousand times as long for parts of wider rows as they lie.
    rows = (x if len(x) > 1 else nn.functional.pad(x, (0, 0, 0, 1))).contiguous()
    return torch.ops.mkldnn._linear_pointwise(rows, weight.contiguous(), None, "none", [], "")[
        : len(x)
    ]


def decoded(codes: torch.Tensor) -> torch.Tensor:
    """The values of e4m3 codes, any shape, in fp32."""
    return _VALUES.index_select(0, codes.contiguous().view(torch.uint8).flatten().int()).view(
        codes.shape
    )
