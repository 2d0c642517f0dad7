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

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from qarl.quant.checkpoint.families import FAMILIES, attention_windows, family_of
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.gradients import Gradients
from qarl.quant.layers.stack import LinearStack
from qarl.quant.operators.attention import attention
from qarl.quant.operators.autograd import GatedMLP, RMSNorm, Rotate
from qarl.quant.operators.moe import EngineMoeBlock, OperatorError
from qarl.quant.operators.packing import Sequences
from qarl.quant.operators.rounding import residual_dtype
from qarl.quant.runtime.batch_invariance import batch_invariant

OPERATORS = ("auto", "engine", "transformers")


class EngineRMSNorm(nn.Module):
    """x / rms(x) · weight, rounded as vLLM's `ir.ops.rms_norm` on this device; `fused_add_rms_norm` where x is a sum of
    residual and branch (added). centred: the weight is kept less 1, which is added in fp32; so is the product, rounded
    once, on every device."""

    def __init__(self, norm: nn.Module, gradients: Gradients, added: bool = False, centred: bool = False):
        super().__init__()
        self._added, self._centred = added, centred
        self.weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        self.epsilon = float(norm.eps if centred else norm.variance_epsilon)  # type: ignore[arg-type]
        self._gradients = gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype or fp32 [..., C] → the weight's dtype [..., C]."""
        if self._centred:
            weight = self.weight.to(torch.float32) + 1.0
            return RMSNorm.apply(x, weight, self.epsilon, self._gradients, self._added).to(self.weight.dtype)
        return RMSNorm.apply(x, self.weight, self.epsilon, self._gradients, self._added)


class EngineAttention(nn.Module):
    """Causal self-attention of Llama, Mistral, Qwen2, Qwen3, Gemma and their mixtures of experts: rotary embedding in
    fp32, rounded once; attention by the engine's kernel (`quant.operators.attention`). window: see there. centred: of
    its norms. qkv: multiplies the projections as one, where they are low-bit layers."""

    def __init__(self, module: nn.Module, context: LayerContext, window: int | None, centred: bool):
        super().__init__()
        self._context, gradients = context, context.gradients
        self.q_proj: nn.Module = module.get_submodule("q_proj")
        self.k_proj: nn.Module = module.get_submodule("k_proj")
        self.v_proj: nn.Module = module.get_submodule("v_proj")
        self.o_proj: nn.Module = module.get_submodule("o_proj")
        self.q_norm = _norm_or_identity(module, "q_norm", gradients, centred)
        self.k_norm = _norm_or_identity(module, "k_norm", gradients, centred)
        self.window = window
        self.qkv: LinearStack | None = None
        self._gradients = gradients
        self.head_dim: int = module.head_dim  # type: ignore[assignment]
        self.scaling: float = module.scaling  # type: ignore[assignment]

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sequences: Sequences | None = None
    ) -> torch.Tensor:
        """x: compute dtype [B, T, C]; cos, sin: compute dtype [B, T, D] → compute dtype [B, T, C].

        sequences: that one row (B = 1) holds; None where every row is one sequence.
        """
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.qkv(x) if self.qkv else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q = Rotate.apply(self.q_norm(q.view(heads)), cos, sin, self._gradients)
        k = Rotate.apply(self.k_norm(k.view(heads)), cos, sin, self._gradients)
        v = v.view(heads)
        y = attention(q, k, v, self.scaling, sequences, self._context.kernel, self.window)
        return self.o_proj(y.reshape(*x.shape[:-1], -1))


def _norm_or_identity(attention: nn.Module, name: str, gradients: Gradients, centred: bool) -> nn.Module:
    norm = getattr(attention, name, None)
    return nn.Identity() if norm is None else EngineRMSNorm(norm, gradients, centred=centred)


class EngineDecoderLayer(nn.Module):
    """A pre-norm decoder layer whose residual stream crosses layers as the engine's norms take it: on CPUs, and where
    norms are centred, as the unrounded fp32 sum, on CUDA else in the compute dtype. Gemma 3's norm what a branch gives
    as well. window: of its attention. first: whether what comes in is the embedding, and no sum."""

    def __init__(
        self,
        layer: nn.Module,
        context: LayerContext,
        window: int | None = None,
        centred: bool = False,
        first: bool = False,
    ):
        super().__init__()
        self._context, self._centred = context, centred

        def norm(name: str, added: bool) -> EngineRMSNorm:
            return EngineRMSNorm(layer.get_submodule(name), context.gradients, added, centred)

        self.self_attn = EngineAttention(layer.get_submodule("self_attn"), context, window, centred)
        self.mlp: nn.Module = layer.get_submodule("mlp")
        self.norms_branches = hasattr(layer, "pre_feedforward_layernorm")
        self.input_layernorm = norm("input_layernorm", added=not first)
        self.post_attention_layernorm = norm("post_attention_layernorm", added=not self.norms_branches)
        if self.norms_branches:
            self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm", added=True)
            self.post_feedforward_layernorm = norm("post_feedforward_layernorm", added=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        sequences: Sequences | None = None,
        **unused: object,
    ) -> torch.Tensor:
        """hidden_states: compute dtype (first layer) or sums [B, T, C] → sums [B, T, C], in `residual_dtype`.

        sequences: see `EngineAttention`. The other keywords of a transformers decoder layer (mask, cache) do not apply
        to whole causal sequences.
        """
        arguments = (hidden_states, *position_embeddings, sequences)
        if not (self._context.checkpointing and torch.is_grad_enabled()):
            return self._layer(*arguments)
        # Nothing here is random. The output is the same bits: codes and kernels stay those of one weight version.
        return checkpoint(self._layer, *arguments, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    def _layer(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sequences: Sequences | None
    ) -> torch.Tensor:
        dtype = self._context.forward_dtype
        sums = torch.float32 if self._centred else residual_dtype(hidden_states, dtype)
        residual = hidden_states.to(dtype)
        branch = self.self_attn(self.input_layernorm(hidden_states), cos, sin, sequences)
        if self.norms_branches:
            branch = self.post_attention_layernorm(branch)
        total = branch.to(sums) + residual.to(sums)
        if self.norms_branches:
            branch = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(total)))
        else:
            branch = self.mlp(self.post_attention_layernorm(total))
        return branch.to(sums) + total.to(dtype).to(sums)


class EngineAngles(nn.Module):
    """Angles out of the engine's own table, in the place of a decoder's `rotary_emb`. Needs vLLM.

    transformers takes the inverse frequencies from the CPU, where its models are made; vLLM makes a table of cosines
    and sines on the engine's device, whose powers differ in last bits.
    """

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


def packed_forward(decoder: nn.Module, tokens: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """A decoder with engine operators over packed sequences, each with positions from 0.

    tokens: int64 [1, N] → compute dtype [1, N, C]. It is the loop of transformers' own decoders of these models,
    without the mask [N, N] they would make.
    """
    positions = sequences.positions(tokens.device)[None]
    hidden = decoder.embed_tokens(tokens)  # type: ignore[operator]
    angles = _angles(decoder, hidden, positions)
    for layer, rotary in zip(decoder.layers, angles, strict=True):  # type: ignore[arg-type]
        hidden = layer(hidden, position_embeddings=rotary, sequences=sequences)
    return decoder.norm(hidden)  # type: ignore[operator]


def _angles(
    decoder: nn.Module, hidden: torch.Tensor, positions: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cosine and sine for every layer; where the configuration has a rotary embedding for each type of layer (Gemma 3),
    its own."""
    rotary, kinds = decoder.rotary_emb, getattr(decoder.config, "layer_types", None)
    if kinds and set(kinds) <= decoder.config.rope_parameters.keys():  # type: ignore[operator, union-attr]
        each = {kind: rotary(hidden, positions, kind) for kind in set(kinds)}  # type: ignore[operator]
        return [each[kind] for kind in kinds]
    return [rotary(hidden, positions)] * len(decoder.layers)  # type: ignore[operator, arg-type]


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
    centred = family_of(model.config.model_type).centred_norms
    decoder.layers = nn.ModuleList(
        EngineDecoderLayer(layer, context, window, centred, first=number == 0)
        for number, (layer, window) in enumerate(zip(decoder.layers, attention_windows(model.config), strict=True))  # type: ignore[arg-type]
    )
    if batch_invariant():
        decoder.rotary_emb = EngineAngles(model.config)
    decoder.norm = EngineRMSNorm(decoder.norm, context.gradients, added=True, centred=centred)  # type: ignore[arg-type]


def why_not(model: PreTrainedModel) -> str:
    """Why engine operators do not fit this model; "" where they do."""
    kind = model.config.model_type
    if family_of(kind).engine_operators:
        return ""
    return f"model type {kind!r} is none of {', '.join(name for name, row in FAMILIES.items() if row.engine_operators)}"
