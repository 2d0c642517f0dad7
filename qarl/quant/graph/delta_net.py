"""Gated delta nets by the kernels that vLLM's engine runs on CPUs: the leaf of their module.

vLLM computes a prompt in chunks of 64 tokens, and every later token by one step of the recurrence.
The two round differently, so each token is computed here as the engine computed it: in chunks up to
`Sequences.prefilled`, then step by step. vLLM's own Python calls the kernels, on states that exist
for one call.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qarl.configs.errors import GraphError
from qarl.quant.graph.packing import Sequences
from qarl.quant.layers.compute_copy import MasterCopy

_CHUNK = 64
"""Tokens of a chunk of the backward, as many as of the engine's."""
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
        if hidden.dtype == torch.float32:
            return module._output_projection(
                _by_formula(module, sequences, (mixed, b, a), weights), z
            )
        if sequences.prefilled is None:
            raise GraphError(
                "this model has gated delta nets, which compute a prompt with other roundings than"
                " sampled tokens, and it is unknown here which tokens are which, because these are"
                " conversations of several turns, or come without a mask of the tokens that were"
                " sampled; set learner.operators to 'transformers', whose log-probs agree up to"
                " rounding"
            )
        core = _Core.apply(module, sequences, mixed, b, a, *weights)
        return module._output_projection(core, z)

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


class _Core(torch.autograd.Function):
    """Convolution, gates and recurrence. It saves its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        sequences: Sequences,
        mixed: Tensor,
        b: Tensor,
        a: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Return the engine's output, compute dtype [N, H, U].

        Args:
            module: vLLM's module.
            sequences: the sequences of the row.
            mixed: queries, keys and values before the convolution, compute dtype [N, C].
            b: strength before its sigmoid, compute dtype [N, H].
            a: decay before its bias and softplus, compute dtype [N, H].
            weights: see `WEIGHTS`: compute dtype [C, 1, K], fp32 [H], compute dtype [H].
        """
        ctx.module = module
        ctx.sequences = sequences
        ctx.save_for_backward(mixed, b, a, *weights)
        rows = [sequences.visible(t.detach()) for t in (mixed, b, a)]
        assert sequences.prefilled is not None
        output = engine_core(module, rows, weights, sequences.seen, sequences.prefilled)
        own = [
            part[len(part) - length :]
            for part, length in zip(output.split(sequences.seen), sequences.lengths, strict=True)
        ]
        return torch.cat(own)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Differentiate `formula`, one sequence at a time."""
        mixed, b, a, *weights = ctx.saved_tensors
        sequences: Sequences = ctx.sequences
        inputs = [sequences.visible(t) for t in (mixed, b, a)]
        dinputs = [torch.zeros_like(t) for t in inputs]
        fp32_weights = [w.detach().float().requires_grad_() for w in weights]
        totals = [torch.zeros_like(w) for w in fp32_weights]
        gradients = grad_outputs[0].split(sequences.lengths)
        for seen, gradient in zip(_slices(sequences.seen), gradients, strict=True):
            part = [t[seen].float().requires_grad_() for t in inputs]
            with torch.enable_grad():
                output = formula(ctx.module, part, fp32_weights)[-len(gradient) :]
            *drows, dconv, ddecay, dbias = torch.autograd.grad(
                output, [*part, *fp32_weights], gradient.float()
            )
            for rows, gradient_of_rows in zip(dinputs, drows, strict=True):
                rows[seen] = gradient_of_rows.to(rows.dtype)
            for total, gradient_of_weight in zip(totals, (dconv, ddecay, dbias), strict=True):
                total += gradient_of_weight
        returned = [total.to(w.dtype) for total, w in zip(totals, weights, strict=True)]
        return None, None, *map(sequences.summed, dinputs), *returned


def _slices(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield consecutive slices of these lengths."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def engine_core(
    module: Any,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
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

    def compute(index: Tensor, metadata: Any) -> None:
        values = output.new_zeros(len(index), *output.shape[1:])
        mixed, b, a = (t[index] for t in rows)
        _cpu_gdn_attention_nonspec(layer, metadata, mixed, b, a, values)
        output[index] = values

    first = [part.start for part in _slices(lengths)]
    prompts = [torch.arange(count) + start for start, count in zip(first, prefilled, strict=True)]
    compute(torch.cat(prompts), _metadata(torch.arange(len(lengths)), prefilled, prefill=True))
    # All sequences take a step together, as in the engine, until each has ended.
    start = torch.tensor(first)
    position = torch.tensor(prefilled)
    end = torch.tensor(lengths)
    while len(active := (position < end).nonzero().flatten()):
        compute((start + position)[active], _metadata(active, [1] * len(active), prefill=False))
        position += 1
    return output


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
        shapes = module.get_state_shape()[:2]
        dtypes = module.get_state_dtype()
        self.kv_cache = tuple(
            torch.zeros(sequences + 1, *shape, dtype=dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )


def _metadata(sequences: Tensor, lengths: Sequence[int], prefill: bool) -> Any:
    """Return vLLM's metadata of a step in which all these sequences are prefilled, or all decoded.

    Args:
        sequences: numbers of the sequences, int64.
        lengths: number of tokens of each.
        prefill: whether they are prefilled, from an empty state.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    count = len(lengths)
    tokens = sum(lengths)
    return GDNAttentionMetadata(
        num_prefills=count if prefill else 0,
        num_prefill_tokens=tokens if prefill else 0,
        num_decodes=0 if prefill else count,
        num_decode_tokens=0 if prefill else tokens,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=tokens,
        has_initial_state=torch.zeros(count, dtype=torch.bool),
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        non_spec_state_indices_tensor=(sequences + 1).to(torch.int32),
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


def _by_formula(
    module: Any, sequences: Sequences, rows: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """Return the output of `formula` for each token of the row, fp32 [N, H, U]."""
    rows = [sequences.visible(t) for t in rows]
    weights = [weight.float() for weight in weights]
    return torch.cat(
        [
            formula(module, [t[seen] for t in rows], weights)[-length:]
            for seen, length in zip(_slices(sequences.seen), sequences.lengths, strict=True)
        ]
    )


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
    written = beta[..., None] * between * (k @ k.transpose(-1, -2))
    decayed = total.exp()[..., None]
    right = beta[..., None] * torch.cat([v, decayed * k], dim=-1)
    solved = torch.linalg.solve_triangular(written, right, upper=False, unitriangular=True)
    new, old = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    seen = between * (q @ k.transpose(-1, -2))
    kept = (total[..., -1:] - total).exp()[..., None] * k
    state = q.new_zeros(q.shape[0], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in range(q.shape[1]):
        values = new[:, chunk] - old[:, chunk] @ state
        outputs.append((decayed * q)[:, chunk] @ state + seen[:, chunk] @ values)
        state = total[:, chunk, -1].exp()[:, None, None] * state + (
            kept[:, chunk].transpose(-1, -2) @ values
        )
    return torch.cat(outputs, dim=1)[:, :tokens]
