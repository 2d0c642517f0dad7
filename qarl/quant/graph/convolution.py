"""Causal depthwise convolutions by the kernels that vLLM's engine runs on CPUs.

They are the leaf of LFM2's short convolutions, and a part of Mamba-2's layers. vLLM computes a
prompt by torch's convolution, and every later token by a kernel of its own from the last inputs. In
16 bits, without bias and activation, both have the same bits, because each sums exact products of
two 16-bit numbers in fp32 and in one order.

Axes: N tokens of the row, S tokens that sequences see, C channels, K width of the convolution.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.quant.graph.packing import Sequences
from qarl.quant.graph.states import Recurrence, prompt_and_rest
from qarl.quant.layers.compute_copy import MasterCopy

_TOKENS = 1024
"""Tokens that are computed one by one in one call. Each needs a copy of the K - 1 before it."""
WEIGHTS = ("conv.weight", "conv.bias")
"""vLLM's names of a short convolution's weights that are no projections."""


class ShortConvolution:
    """A short convolution of vLLM's in the graph: output = C · convolution(B · x), projected.

    Args:
        module: vLLM's `ShortConv`, whose projections have leaves already.
        weights: copies of `WEIGHTS`, by name; without the bias if it has none.
        sequences: returns the sequences of the forward that is running.
    """

    def __init__(
        self,
        module: Any,
        weights: Mapping[str, MasterCopy],
        sequences: Callable[[], Sequences],
    ):
        self.module = module
        self.weights = weights
        self.sequences = sequences

    def __call__(self, hidden: Tensor, output: Tensor) -> None:
        """Write the layer's output, compute dtype [N, columns], of its input of that shape.

        Raises `GraphError` if it is unknown which tokens the engine prefilled, and they have other
        bits than the tokens that it sampled.
        """
        projected, _ = self.module.in_proj(hidden)
        weights = [
            self.weights[name].routed() if name in self.weights else None for name in WEIGHTS
        ]
        sequences = self.sequences()
        width = self.module.L_cache
        if sequences.prefilled is None and weights[1] is None and same_bits(width, hidden.dtype):
            sequences = replace(sequences, prefilled=sequences.seen)
        gated = SHORT_CONVOLUTION(sequences, [projected], weights)
        output.copy_(self.module.out_proj(gated)[0])


@functools.cache
def same_bits(width: int, dtype: torch.dtype) -> bool:
    """Return whether convolutions without bias give a prompt the bits of sampled tokens here.

    On drawn inputs, once in a process; takes some 10 ms.
    """
    if dtype == torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 64, generator=generator).to(dtype)
    weights = torch.randn(64, 1, width, generator=generator).to(dtype), None
    prompt, sampled = (engine_convolution(x, weights, [1000], [n], None) for n in (1000, 1))
    return torch.equal(prompt, sampled)


def gated_values(
    rows: Sequence[Tensor],
    weights: Sequence[Any],
    lengths: Sequence[int],
    prefilled: Sequence[int],
) -> Tensor:
    """Return the engine's C · convolution(B · x), compute dtype [S, C]; see `EngineRows`.

    rows: B, C and x side by side, compute dtype [S, 3C]. weights: weight [C, 1, K] and bias [C].
    """
    (projected,) = rows
    before, after, x = projected.chunk(3, dim=-1)
    return after * engine_convolution(before * x, weights, lengths, prefilled, None)


def gated_formula(rows: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    """Return C · convolution(B · x) of one sequence in torch's operators; see `gated_values`."""
    (projected,) = rows
    before, after, x = projected.chunk(3, dim=-1)
    return after * convolution(before * x, weights)


SHORT_CONVOLUTION = Recurrence("short convolutions", gated_values, gated_formula)
"""C · convolution(B · x). Its input is `gated_values`'; its weights are `WEIGHTS`."""


def engine_convolution(
    x: Tensor,
    weights: Sequence[Any],
    lengths: Sequence[int],
    prefilled: Sequence[int],
    activation: str | None,
) -> Tensor:
    """Return vLLM's causal convolution of sequences that follow one another, [S, C].

    Args:
        x: inputs, compute dtype [S, C].
        weights: weight [C, 1, K] and bias [C] or None.
        lengths: number of tokens of each sequence, Σ = S.
        prefilled: number of leading tokens of each sequence that are computed together.
        activation: "silu" or None.
    """
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import (
        causal_conv1d_fn_cpu,
        causal_conv1d_update_cpu,
    )

    weight, bias = weights
    matrix = weight.squeeze(1)
    channels, width = matrix.shape
    output = torch.empty_like(x)
    prompt, rest = prompt_and_rest(lengths, prefilled)
    count = len(prefilled)
    output[prompt] = causal_conv1d_fn_cpu(
        x[prompt].T,
        matrix,
        bias,
        x.new_zeros(count, channels, width - 1),
        torch.tensor([0, *prefilled]).cumsum(0).to(torch.int32),
        torch.arange(count, dtype=torch.int32),
        torch.zeros(count, dtype=torch.bool),
        activation=activation,
    ).T
    position = torch.cat([torch.arange(length) for length in lengths])
    back = torch.arange(1 - width, 0)
    for tokens in rest.split(_TOKENS):
        # Every token is a sequence of its own, whose state are the inputs before it. State 0 is not
        # used, because vLLM's kernel skips it.
        earlier = x[(tokens[:, None] + back).clamp_min(0)]
        earlier[position[tokens][:, None] + back < 0] = 0
        state = F.pad(earlier.transpose(1, 2), (0, 0, 0, 0, 1, 0))
        output[tokens] = causal_conv1d_update_cpu(
            x[tokens],
            state,
            matrix,
            bias,
            activation=activation,
            conv_state_indices=torch.arange(1, len(tokens) + 1, dtype=torch.int32),
        )
    return output


def convolution(x: Tensor, weights: Sequence[Any]) -> Tensor:
    """Return the causal convolution of one sequence in torch's operators, [S, C].

    x: inputs [S, C]. weights: weight [C, 1, K] and bias [C] or None.
    """
    weight, bias = weights
    padded = F.pad(x.T, (weight.shape[-1] - 1, 0))
    return F.conv1d(padded[None], weight, bias, groups=len(weight))[0].T
