"""Angles of rotary embeddings out of the engine's own table.

transformers takes the inverse frequencies from the CPU, where its models are made; vLLM makes a table of cosines and
sines on the engine's device, whose powers differ in last bits.

Axes: B sequences, T tokens, D head size.
"""

import torch
from torch import nn
from transformers import PretrainedConfig


class EngineAngles(nn.Module):
    """Takes the place of a decoder's `rotary_emb`. Needs vLLM."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self._config = config

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, kind: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: of any shape, which says dtype and device; positions: int64 [B, T]; kind: type of layer, where each has
        angles of its own → cosines and sines, x's dtype [B, T, D], each half of D the same."""
        from qarl.quant.kernels.vllm_operators import rotary_table

        parameters = self._config.rope_parameters  # type: ignore[attr-defined]
        head = getattr(self._config, "head_dim", None) or self._config.hidden_size // self._config.num_attention_heads  # type: ignore[attr-defined]
        longest = self._config.max_position_embeddings  # type: ignore[attr-defined]
        table = rotary_table(head, longest, parameters if kind is None else parameters[kind], x.dtype, x.device)
        cos, sin = table[positions].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
