"""Norms, rotary embedding and attention rounded where the engine rounds them.

Low-bit activations amplify upstream noise: a value that lands on the other side of a rounding boundary flips a
code. What is left of the mismatch once the products agree comes from places where transformers rounds to the compute
dtype and vLLM does not, on CPUs these three (`quant.operators.rounding` says what differs on CUDA):

- vLLM's fused add + RMSNorm normalizes the fp32 sum of residual and branch; transformers the rounded sum;
- vLLM's rotary kernel computes in fp32 and rounds once; transformers rounds after every operation;
- vLLM's attention on CPUs keeps scores and probabilities in fp32, and is a kernel of its own.

Here a pre-norm decoder's modules are replaced by ones that do as vLLM does, with backwards of their own that keep
little (`quant.operators.autograd`).

Sequences may also be packed: one row of N tokens holds one after the other, and attention stays within each.

Axes: B sequences, T tokens, N tokens of all sequences, H heads, D head size, C hidden columns.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from quant.checkpoint.families import FAMILIES, family_of
from quant.layers.context import LayerContext
from quant.layers.gradients import Gradients
from quant.layers.stack import LinearStack
from quant.operators.attention import attention
from quant.operators.autograd import GatedMLP, RMSNorm, Rotate
from quant.operators.moe import EngineMoeBlock, OperatorError
from quant.operators.rounding import residual_dtype

OPERATORS = ("auto", "engine", "transformers")


class EngineRMSNorm(nn.Module):
    """x / rms(x) · weight, rounded as vLLM's `ir.ops.rms_norm` on this device; `fused_add_rms_norm` where x is a sum of
    residual and branch (added)."""

    def __init__(self, norm: nn.Module, gradients: Gradients, added: bool = False):
        super().__init__()
        self._added = added
        self.weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        self.epsilon = float(norm.variance_epsilon)  # type: ignore[arg-type]
        self._gradients = gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype or fp32 [..., C] → the weight's dtype [..., C]."""
        return RMSNorm.apply(x, self.weight, self.epsilon, self._gradients, self._added)


class EngineAttention(nn.Module):
    """Causal self-attention of Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts: rotary embedding in fp32,
    rounded once; attention by the engine's kernel (`quant.operators.attention`). qkv: multiplies the projections as
    one, where they are low-bit layers."""

    def __init__(self, module: nn.Module, context: LayerContext):
        super().__init__()
        self._context, gradients = context, context.gradients
        self.q_proj: nn.Module = module.get_submodule("q_proj")
        self.k_proj: nn.Module = module.get_submodule("k_proj")
        self.v_proj: nn.Module = module.get_submodule("v_proj")
        self.o_proj: nn.Module = module.get_submodule("o_proj")
        self.q_norm = _norm_or_identity(module, "q_norm", gradients)
        self.k_norm = _norm_or_identity(module, "k_norm", gradients)
        self.qkv: LinearStack | None = None
        self._gradients = gradients
        self.head_dim: int = module.head_dim  # type: ignore[assignment]
        self.scaling: float = module.scaling  # type: ignore[assignment]

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> torch.Tensor:
        """x: compute dtype [B, T, C]; cos, sin: compute dtype [B, T, D] → compute dtype [B, T, C].

        lengths: of the sequences that one row (B = 1) holds; None where every row is one sequence.
        """
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.qkv(x) if self.qkv else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q = Rotate.apply(self.q_norm(q.view(heads)), cos, sin, self._gradients)
        k = Rotate.apply(self.k_norm(k.view(heads)), cos, sin, self._gradients)
        v = v.view(heads)
        y = attention(q, k, v, self.scaling, lengths, self._context.kernel)
        return self.o_proj(y.reshape(*x.shape[:-1], -1))


def _norm_or_identity(attention: nn.Module, name: str, gradients: Gradients) -> nn.Module:
    norm = getattr(attention, name, None)
    return nn.Identity() if norm is None else EngineRMSNorm(norm, gradients)


class EngineDecoderLayer(nn.Module):
    """A pre-norm decoder layer whose residual stream crosses layers as the engine's norms take it: on CPUs as the
    unrounded fp32 sum, on CUDA in the compute dtype. first: whether what comes in is the embedding, and no sum."""

    def __init__(self, layer: nn.Module, context: LayerContext, first: bool = False):
        super().__init__()
        self._context, gradients = context, context.gradients
        self.self_attn = EngineAttention(layer.self_attn, context)  # type: ignore[arg-type]
        self.mlp: nn.Module = layer.get_submodule("mlp")
        self.input_layernorm = EngineRMSNorm(layer.input_layernorm, gradients, added=not first)  # type: ignore[arg-type]
        self.post_attention_layernorm = EngineRMSNorm(layer.post_attention_layernorm, gradients, added=True)  # type: ignore[arg-type]

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        lengths: Sequence[int] | None = None,
        **unused: object,
    ) -> torch.Tensor:
        """hidden_states: compute dtype (first layer) or sums [B, T, C] → sums [B, T, C], in `residual_dtype`.

        lengths: see `EngineAttention`. The other keywords of a transformers decoder layer (mask, cache) do not apply to
        whole causal sequences.
        """
        given = (hidden_states, *position_embeddings, lengths)
        if not (self._context.checkpointing and torch.is_grad_enabled()):
            return self._layer(*given)
        # Nothing here is random. The output is the same bits: codes and kernels stay those of one weight version.
        return checkpoint(self._layer, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    def _layer(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int] | None
    ) -> torch.Tensor:
        dtype = self._context.forward_dtype
        sums = residual_dtype(hidden_states, dtype)
        residual = hidden_states.to(dtype)
        branch = self.self_attn(self.input_layernorm(hidden_states), cos, sin, lengths)
        total = branch.to(sums) + residual.to(sums)
        branch = self.mlp(self.post_attention_layernorm(total))
        return branch.to(sums) + total.to(dtype).to(sums)


def packed_forward(decoder: nn.Module, tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """A decoder with engine operators over packed sequences, each with positions from 0.

    tokens: int64 [1, N], N = Σ lengths → compute dtype [1, N, C]. It is the loop of transformers' own decoders of these
    models, without the mask [N, N] they would make.
    """
    positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])[None]
    hidden = decoder.embed_tokens(tokens)  # type: ignore[operator]
    rotary = decoder.rotary_emb(hidden, positions)  # type: ignore[operator]
    for layer in decoder.layers:  # type: ignore[union-attr]
        hidden = layer(hidden, position_embeddings=rotary, lengths=lengths)
    return decoder.norm(hidden)  # type: ignore[operator]


def install_engine_operators(model: PreTrainedModel, context: LayerContext) -> None:
    """Replace the decoder's modules in place; parameter names stay. Raises `OperatorError` for other models."""
    reason = why_not(model)
    if reason:
        raise OperatorError(f"engine operators: {reason}; set learner.operators to 'transformers' or 'auto'")
    decoder = model.base_model
    for number, layer in enumerate(decoder.layers):  # type: ignore[arg-type]
        if hasattr(layer.mlp, "experts"):
            layer.mlp = EngineMoeBlock(layer.mlp, number, getattr(model.config, "norm_topk_prob", True))
        else:
            layer.mlp = GatedMLP(layer.mlp, context.gradients)
    layers = [EngineDecoderLayer(layer, context, number == 0) for number, layer in enumerate(decoder.layers)]  # type: ignore[arg-type]
    decoder.layers = nn.ModuleList(layers)
    decoder.norm = EngineRMSNorm(decoder.norm, context.gradients, added=True)  # type: ignore[arg-type]


def why_not(model: PreTrainedModel) -> str:
    """Why engine operators do not fit this model; "" where they do."""
    config, family = model.config, family_of(model.config.model_type)
    if not family.engine_operators:
        known = ", ".join(kind for kind, row in FAMILIES.items() if row.engine_operators)
        return f"model type {config.model_type!r} is none of {known}"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        family.windowed and getattr(config, "sliding_window", None)
    ):
        return "sliding-window attention is not covered"
    return ""
