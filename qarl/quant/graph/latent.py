"""Causal latent attention of whole sequences by the engine's kernel: the leaf of `MLAAttention`.

On CPUs QaRL's engines compute every token as vLLM decodes it (`quant.kernels.latent_attention`), so
a token has the same bits whether it is prefilled, decoded, or scored here. The backward
differentiates the same attention with every head's keys and values made from the latents, in fp32.

Axes: N tokens of all sequences, H heads, L columns of a latent, P columns of a head's query that
are compared with the latent, R columns that are rotated, V columns of a head's value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.quant.graph.attention import torch_attention
from qarl.quant.graph.packing import Sequences
from qarl.quant.kernels.base import Scoring
from qarl.quant.kernels.latent_attention import LatentHeads, dequantized, latent_attention
from qarl.quant.layers.stack import LinearStack


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer's latent attention."""

    heads: int
    """H."""
    columns: int
    """P."""
    scale: float
    """Factor of the scores."""


class LatentAttention:
    """Latent attention of vLLM's in the graph.

    Args:
        module: vLLM's `MLAAttention`.
        stack: its `kv_b_proj`.
        sequences: returns the sequences of the forward that is running.
    """

    def __init__(self, module: Any, stack: LinearStack, sequences: Callable[[], Sequences]):
        self.latent_columns = module.kv_lora_rank
        self.sizes = Sizes(module.num_heads, module.qk_nope_head_dim, module.impl.scale)
        self.stack = stack
        self.sequences = sequences

    def __call__(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, *unused: object, **also: object
    ) -> Tensor:
        """Return the attention's output, compute dtype [N, H · V].

        Args:
            q: queries, compute dtype [N, H, P + R], rotated.
            kv_c_normed: latents [N, L].
            k_pe: rotated keys [N, 1, R].
        """
        weight = dequantized(self.stack, self.latent_columns, q.dtype, q.device)
        rotated = k_pe.flatten(1).to(q.dtype)  # as the engine's cache has them
        y = _Latent.apply(q, kv_c_normed, rotated, weight, self.sizes, self.sequences())
        return y.flatten(1)


class _Latent(torch.autograd.Function):
    """Latent attention with the engine's kernel forward. It saves its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        rotated: Tensor,
        weight: Tensor,
        sizes: Sizes,
        sequences: Sequences,
    ) -> Tensor:
        """Return the attention's output, compute dtype [N, H, V].

        Args:
            q: queries, compute dtype [N, H, P + R].
            latent: [N, L].
            rotated: rotated keys [N, R].
            weight: `kv_b_proj`, dequantized and transposed, [L, H · (P + V)].
            sizes: the layer's sizes.
            sequences: which tokens see which.
        """
        ctx.sizes = sizes
        ctx.sequences = sequences
        ctx.save_for_backward(q, latent, rotated, weight)
        heads = LatentHeads(weight.T, sizes.heads, sizes.columns)
        keys = sequences.visible(torch.cat([latent, rotated], dim=-1))
        return latent_attention(q, keys, heads, sizes.scale, sequences.lengths, sequences.seen)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Differentiate `formula` in fp32, and round each gradient once."""
        saved = ctx.saved_tensors
        inputs = [t.detach().float().requires_grad_() for t in saved]
        with torch.enable_grad():
            y = formula(inputs, ctx.sizes, ctx.sequences)
        gradients = torch.autograd.grad(y, inputs, grad_outputs[0].float())
        rounded = [g.to(t.dtype) for g, t in zip(gradients, saved, strict=True)]
        return *rounded, None, None


def formula(inputs: Sequence[Tensor], sizes: Sizes, sequences: Sequences) -> Tensor:
    """Return latent attention in torch's operators, fp32 [N, H, V].

    inputs: queries, latents, rotated keys and weight, see `_Latent.forward`, here in fp32.
    """
    q, latent, rotated, weight = inputs
    keys, values = (
        (latent @ weight).unflatten(-1, (sizes.heads, -1)).tensor_split([sizes.columns], dim=-1)
    )
    keys = torch.cat([keys, rotated[:, None].expand(-1, sizes.heads, -1)], dim=-1)
    # torch's attention without a matrix of all scores needs values of the keys' columns
    columns = values.shape[-1]
    width = max(columns, keys.shape[-1])
    q, keys, values = (F.pad(t, (0, width - t.shape[-1])) for t in (q, keys, values))
    y = torch_attention(q, keys, values, None, Scoring(scale=sizes.scale), sequences)
    return y[..., :columns]
