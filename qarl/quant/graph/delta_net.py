"""Gated delta nets by the kernels that vLLM's engine runs on CPUs: the leaf of their module.

vLLM computes a prompt in chunks of 64 tokens, and every later token by one step of the recurrence.
The two round differently, so each token is computed here as the engine computed it: in chunks up to
`Sequences.prefilled`, then step by step. vLLM's own Python calls the kernels for the prompt, on
states that exist for one call. After the prompt its kernels are called from here, without what its
Python repeats at each step.

The backward differentiates the recurrence in fp32, also in chunks. For a head with the state
S [D, U], keys k and queries q of unit length [D], values v [U], decay g ≤ 0 and strength β, a token
computes

    S ← e^g · S;   S ← S + k · (β · (v - Sᵀk))ᵀ;   output = Sᵀq / √D

("Gated Delta Networks", arXiv 2412.06464, eq. 10). With G the sum of g within a chunk, S₀ the state
before it and A[t, j] = β_t · e^(G_t - G_j) · k_t·k_j for j < t, what a chunk's tokens write is
W = (I + A)⁻¹ · β · (V - e^G · K·S₀).

Axes: N tokens of the row, S tokens that sequences see, B sequences, H heads of values, G heads of
keys, D columns of a key, U columns of a value, C channels of the convolution (2·G·D + H·U), c
chunks, T tokens of a chunk, K width of the convolution.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qarl.quant.graph.packing import Sequences
from qarl.quant.graph.states import Recurrence, slices
from qarl.quant.layers.compute_copy import MasterCopy

_CHUNK = 64
"""Tokens of a chunk of the backward, as many as of the engine's."""
_BLOCK = 512
"""Tokens whose convolution is computed in one call, which bounds the memory of their states."""
_EPSILON = 1e-6
"""Added to the squared length of queries and keys, as in vLLM's kernels and in transformers."""
WEIGHTS = ("conv1d", "A_log", "dt_bias")
"""vLLM's names of the weights that are no projections: convolution, decay, and its bias."""


class DeltaNet:
    """A gated delta net of vLLM's in the graph.

    Args:
        module: vLLM's `QwenGatedDeltaNetAttention`, whose projections and norm have leaves already.
        weights: copies of `WEIGHTS`, by name.
        sequences: returns the sequences of the forward that is running.
    """

    def __init__(
        self, module: Any, weights: Mapping[str, MasterCopy], sequences: Callable[[], Sequences]
    ):
        self.module = module
        self.weights = weights
        self.sequences = sequences
        self.method = module._forward_method
        """The engine's own implementation, by whose name engine and learner are compared."""
        self.recurrence = recurrence_of(module)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output, compute dtype [N, columns], of its input of that shape.

        Raises `GraphError` if it is unknown which tokens the engine prefilled.
        """
        module = self.module
        sequences = self.sequences()
        mixed, z, b, a = self._projected(hidden)
        weights = [self.weights[name].routed() for name in WEIGHTS]
        # vLLM's kernels have bfloat16 alone, and `quant.model.operator_check` runs the rest of the
        # model in fp32
        compute = self.recurrence.by_formula if hidden.dtype == torch.float32 else self.recurrence
        return module._output_projection(compute(sequences, (mixed, b, a), weights), z)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the products that vLLM's `forward_cpu` begins with.

        These are input of the convolution [N, C], output gate [N, H, U], and, before their
        nonlinearities, strength and decay [N, H].
        """
        module = self.module
        qkvz, _ = module.in_proj_qkvz(hidden)
        ba, _ = module.in_proj_ba(hidden)
        if module.gqa_interleaved_layout:
            *qkv, z, b, a = module.fix_query_key_value_ordering(qkvz, ba)
            return torch.cat([part.flatten(1) for part in qkv], dim=-1), z, b, a
        mixed, z = qkvz.split([module.conv_dim, module.value_dim], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        return mixed, z.unflatten(-1, (module.num_v_heads, module.head_v_dim)), b, a


def recurrence_of(module: Any) -> Recurrence:
    """Return the convolution, gates and recurrence of vLLM's module, of which only sizes are read.

    Its inputs are those of the convolution, compute dtype [N, C], and, before their nonlinearities,
    strength and decay [N, H]; its weights are `WEIGHTS`.
    """
    return Recurrence("gated delta nets", partial(engine_core, module), partial(formula, module))


def engine_core(
    module: Any,
    rows: Sequence[Tensor],
    weights: Sequence[Any],
    lengths: Sequence[int],
    prefilled: Sequence[int],
) -> Tensor:
    """Return vLLM's values of sequences that follow one another, compute dtype [S, H, U].

    Args:
        module: vLLM's module, of which only the sizes are read.
        rows: input of the convolution, strength and decay of all tokens, [S, …] each.
        weights: see `WEIGHTS`.
        lengths: number of tokens of each sequence, Σ = S.
        prefilled: number of leading tokens of each sequence that are computed in chunks.
    """
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _cpu_gdn_attention_nonspec

    layer = _Layer(module, weights, len(lengths))
    output = torch.zeros(len(rows[0]), module.num_v_heads, module.head_v_dim, dtype=rows[0].dtype)
    first = [part.start for part in slices(lengths)]
    parts = [torch.arange(count) + start for start, count in zip(first, prefilled, strict=True)]
    prompts = torch.cat(parts)
    values = output.new_zeros(len(prompts), *output.shape[1:])
    mixed, b, a = (t[prompts] for t in rows)
    _cpu_gdn_attention_nonspec(layer, _prompt_metadata(prefilled), mixed, b, a, values)
    output[prompts] = values
    _decode(layer, rows, torch.tensor([first, lengths, prefilled]), output)
    return output


def _decode(
    layer: "_Layer",
    rows: Sequence[Tensor],
    counts: Tensor,
    output: Tensor,
) -> None:
    """Write the values of all tokens after the prompts, from the states after the prompts.

    All sequences take a step of the recurrence together, as in the engine, until each has ended.
    The convolution reads inputs alone, so it is not computed step by step.

    Args:
        layer: the weights, and the states after the prompts, which change.
        rows: see `engine_core`.
        counts: of each sequence the position of its first token, the number of its tokens, and that
            of the leading ones, which are not computed here, int64 [3, B].
        output: compute dtype [S, H, U].
    """
    import vllm._custom_ops as ops

    first, lengths, prefilled = counts
    # The sequences of the most steps come first, so that those of any step are the first ones.
    steps, order = (lengths - prefilled).sort(descending=True, stable=True)
    step = torch.arange(int(steps[0]))[:, None]
    taken = step < steps
    if not taken.any():
        return
    index = ((first + prefilled)[order] + step)[taken]  # step by step
    start = first[order].expand_as(taken)[taken]
    mixed, b, a = rows
    parts = zip(index.split(_BLOCK), start.split(_BLOCK), strict=True)
    channels = torch.cat([layer.convolved(mixed, *part) for part in parts])
    q, k, v = layer.rearrange_mixed_qkv(channels)
    a, b = a[index], b[index]
    values = output.new_empty(len(index), *output.shape[1:])
    slots = (order + 1).to(torch.int32)
    starts = torch.arange(len(order) + 1, dtype=torch.int32)
    for tokens in slices(taken.sum(1).tolist()):
        count = tokens.stop - tokens.start
        values[tokens] = ops.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=q[:, tokens],
            k=k[:, tokens],
            v=v[:, tokens],
            a=a[tokens],
            b=b[tokens],
            initial_state_source=layer.states,
            initial_state_indices=slots[:count],
            cu_seqlens=starts[: count + 1],
            use_qk_l2norm_in_kernel=True,
        ).squeeze(1)
    output[index] = values


class _Layer:
    """What vLLM's Python reads of a layer of the engine: sizes, weights and states.

    State 0 is not used, because vLLM's kernels skip it.
    """

    def __init__(self, module: Any, weights: Sequence[Tensor], sequences: int):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        convolution, decay, bias = (w.detach() for w in weights)
        self.activation = module.activation
        self.rearrange_mixed_qkv = module.rearrange_mixed_qkv
        self.A_log = decay
        self.dt_bias = bias
        holder: Any = nn.Module()
        holder.weight = nn.Parameter(convolution.clone(), requires_grad=False)
        # On CPUs with bfloat16 instructions vLLM packs this weight when it loads it.
        dispatch_cpu_unquantized_gemm(holder, remove_weight=False)
        self.conv1d = SimpleNamespace(weight=holder.weight, bias=None)
        self.width = convolution.shape[-1]
        shapes = module.get_state_shape()[:2]
        dtypes = module.get_state_dtype()
        self.kv_cache = tuple(
            torch.zeros(sequences + 1, *shape, dtype=dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )

    @property
    def states(self) -> Tensor:
        """The recurrence's states in the shape that its kernels take, fp32 [1 + B, H, D, U]."""
        slots, heads, columns, keys = self.kv_cache[1].shape
        return self.kv_cache[1].view(slots, heads, keys, columns)

    def convolved(self, mixed: Tensor, index: Tensor, start: Tensor) -> Tensor:
        """Return the convolution of tokens after the prompts, compute dtype [n, C].

        Each token is a sequence of its own, whose state is the inputs before it.

        Args:
            mixed: inputs of all tokens, [S, C].
            index: positions of these tokens, int64 [n].
            start: position of the first token of each one's sequence, int64 [n].
        """
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu
        from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import is_arm_bf16

        weight = self.conv1d.weight
        earlier = index[:, None] - torch.arange(self.width - 1, 0, -1)
        before = mixed[earlier.clamp(min=0)] * (earlier >= start[:, None])[..., None]
        # vLLM's view of a state that the engine stores as [K - 1, C]
        states = F.pad(before, (0, 0, 0, 0, 1, 0)).transpose(1, 2)
        slots = torch.arange(1, len(index) + 1, dtype=torch.int32)
        # vLLM's `_cpu_gdn_attention_nonspec` chooses by the same condition.
        if torch.cpu._is_avx512_bf16_supported() or is_arm_bf16():
            return ops.causal_conv1d_update_cpu(
                x=mixed[index],
                conv_states=states,
                weight=weight,
                bias=None,
                silu_activation=self.activation == "silu",
                conv_state_indices=slots,
                is_weight_packed=True,
            )
        return causal_conv1d_update_cpu(
            x=mixed[index],
            conv_state=states,
            weight=weight.view(weight.size(0), weight.size(2)),
            activation=self.activation,
            conv_state_indices=slots,
        )


def _prompt_metadata(lengths: Sequence[int]) -> Any:
    """Return vLLM's metadata of a step in which all sequences are prefilled from an empty state.

    lengths: number of tokens of each prompt.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    count = len(lengths)
    tokens = sum(lengths)
    return GDNAttentionMetadata(
        num_prefills=count,
        num_prefill_tokens=tokens,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=tokens,
        has_initial_state=torch.zeros(count, dtype=torch.bool),
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        non_spec_state_indices_tensor=torch.arange(1, count + 1, dtype=torch.int32),
    )


def formula(module: Any, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the output of one sequence in torch's operators, fp32 [S, H, U].

    module: vLLM's module, of which only the sizes are read. rows, weights: see `engine_core`, here
    in fp32.
    """
    mixed, b, a = rows
    convolution, decay, bias = weights
    width = convolution.shape[-1]
    padded = F.pad(mixed.T, (width - 1, 0))
    channels = F.silu(F.conv1d(padded[None], convolution, groups=len(convolution))[0].T)
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(0, 1)
        for part, heads in zip(
            channels.split(sizes, dim=-1),
            (module.num_k_heads, module.num_k_heads, module.num_v_heads),
            strict=True,
        )
    )
    groups = module.num_v_heads // module.num_k_heads
    q, k = (_unit(t).repeat_interleave(groups, dim=0) for t in (q, k))
    g = -decay.exp() * F.softplus(a + bias)
    q = q / module.head_k_dim**0.5
    return delta_rule(q, k, v, g.T, b.sigmoid().T).transpose(0, 1)


def _unit(x: Tensor) -> Tensor:
    """Return vectors [..., D] scaled to unit length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of the gated delta rule from an empty state, chunk by chunk: [H, S, U].

    Args:
        q: queries [H, S, D], scaled.
        k: keys [H, S, D].
        v: values [H, S, U].
        g: logarithm of the decay, at most 0, [H, S].
        beta: strength [H, S].
    """
    tokens = q.shape[1]
    # What is padded writes nothing and decays nothing.
    rest = -tokens % _CHUNK
    q, k, v = (F.pad(t, (0, 0, 0, rest)).unflatten(1, (-1, _CHUNK)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, rest)).unflatten(1, (-1, _CHUNK)) for t in (g, beta))
    total = g.cumsum(-1)  # [H, c, T]
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    # A of the module's docstring; its diagonal is not read
    overlap = beta[..., None] * between * (k @ k.transpose(-1, -2))
    decayed = total.exp()[..., None]
    right = beta[..., None] * torch.cat([v, decayed * k], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
    new, old = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    seen = between * (q @ k.transpose(-1, -2))
    kept = (total[..., -1:] - total).exp()[..., None] * k
    state = q.new_zeros(q.shape[0], k.shape[-1], v.shape[-1])
    outputs = []
    # Unbound once: the gradient of a chunk taken by its index has the size of all chunks.
    chunks = (new, old, decayed * q, seen, kept.transpose(-1, -2), total[..., -1, None, None].exp())
    for written, erased, query, own, key, decay in zip(*(t.unbind(1) for t in chunks), strict=True):
        values = written - erased @ state
        outputs.append(query @ state + own @ values)
        state = decay * state + key @ values
    return torch.cat(outputs, dim=1)[:, :tokens]
