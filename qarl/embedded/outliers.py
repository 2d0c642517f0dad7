"""Columns of large weights in a model whose function stays: what makes coarse low-bit codes lose.

Weights of large models have them, and a scale shared with one leaves few codes to the rest. The embedded policies are
too small to grow any: by fourth moments their weights are normally distributed (kurtosis 3.2), and four bits a row
cost them little.
"""

import torch
from torch import Tensor

EVERY = 16
"""One column of so many is widened."""


@torch.no_grad()
def widen_columns(state: dict[str, Tensor], factor: float) -> None:
    """Multiply every 16th column of a Qwen3's or Qwen3-MoE's q, k, v, gate, up and down projections by `factor`, in
    place, and divide what feeds it: the norm's weight, or the row of the up projection.

    state: the model's parameters by name, [O, I], experts stacked [E, O, I] with gate and up as one. Exact for powers
    of two; else each product is rounded once.
    """
    for name, weight in state.items():
        if name.endswith(("_proj.weight", ".gate.weight", ".gate_up_proj", ".down_proj")) and "o_proj" not in name:
            weight[..., ::EVERY] *= factor
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            weight[::EVERY] /= factor
        if name.endswith("up_proj.weight"):
            weight[::EVERY] /= factor
        if name.endswith(".gate_up_proj"):
            weight[:, weight.shape[1] // 2 :: EVERY] /= factor
