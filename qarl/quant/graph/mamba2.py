"""Mamba-2 layers by the kernels that vLLM's engine runs on CPUs: the leaf of their module.

vLLM computes a prompt and every later token by two kernels, which take other exponentials. Of a
prompt it also rounds the convolution before the activation, of later tokens after it alone. So each
token is computed here as the engine computed it (`quant.graph.states`), on states that exist for
one call.

The backward differentiates the recurrence in fp32, in chunks. For a head with the state S [P, D],
inputs x [P], keys B and queries C [D], step δ > 0 and A < 0, a token computes

    S ← e^(δ·A) · S + δ · x · Bᵀ;   output = S·C + D·x

("Transformers are SSMs", arXiv 2405.21060, eq. 1 and section 6). With G the sum of δ·A within a
chunk and S₀ the state before it, a chunk's outputs are
e^G · S₀·C + Σ_{j ≤ t} e^(G_t - G_j) · (C_t·B_j) · δ_j · x_j.

Axes: N tokens of the row, S tokens that sequences see, H heads, G groups of heads that share B and
C, P columns of a head, D columns of the state, C channels of the convolution (H·P + 2·G·D), c
chunks, T tokens of a chunk, K width of the convolution.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.quant.graph.convolution import convolution, engine_convolution
from qarl.quant.graph.packing import Sequences
from qarl.quant.graph.states import Recurrence, prompt_and_rest
from qarl.quant.layers.compute_copy import MasterCopy

_CHUNK = 64
"""Tokens of a chunk of the backward."""
WEIGHTS = ("conv1d.weight", "conv1d.bias", "A", "D", "dt_bias")
"""vLLM's names of the weights that are no projections. Of A the checkpoint has log(-A)."""


class Mamba2:
    """A Mamba-2 layer of vLLM's in the graph.

    Args:
        module: vLLM's `MambaMixer2`, whose projections and norm have leaves already.
        weights: copies of `WEIGHTS`, by name; without the convolution's bias if it has none.
        sequences: returns the sequences of the forward that is running.
    """

    def __init__(
        self, module: Any, weights: Mapping[str, MasterCopy], sequences: Callable[[], Sequences]
    ):
        self.module = module
        self.weights = weights
        self.sequences = sequences
        self.recurrence = recurrence_of(module)

    def __call__(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        """Return the layer's output, compute dtype [N, columns], of its input of that shape.

        Raises `GraphError` if it is unknown which tokens the engine prefilled.

        mup_vector: factors of the first projection's columns (Falcon-H1).
        """
        module = self.module
        projected, _ = module.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        gate = projected[..., : module.intermediate_size]
        weights = [
            self.weights[name].routed() if name in self.weights else None for name in WEIGHTS
        ]
        rows = [projected[..., module.intermediate_size :]]
        scanned = self.recurrence(self.sequences(), rows, weights)
        return module.out_proj(module.norm(scanned, gate))[0]


def recurrence_of(module: Any) -> Recurrence:
    """Return the convolution and recurrence of vLLM's module, of which only sizes are read.

    Its input are x, B and C before the convolution and the step before its bias and softplus, side
    by side, compute dtype [N, C + H]; its weights are `WEIGHTS`, with log(-A) in fp32.
    """
    return Recurrence("Mamba-2 layers", partial(engine_scan, module), partial(formula, module))


def engine_scan(
    module: Any,
    rows: Sequence[Tensor],
    weights: Sequence[Any],
    lengths: Sequence[int],
    prefilled: Sequence[int],
) -> Tensor:
    """Return vLLM's values of sequences that follow one another, compute dtype [S, H·P].

    module, rows, weights: see `recurrence_of`. lengths, prefilled: see `EngineRows`.
    """
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    convolution_weight, convolution_bias, log_decay, skip, bias = weights
    # what vLLM does when it loads this weight
    decay = -torch.exp(log_decay.float())
    mixed, step = rows[0].split([module.conv_dim, module.num_heads], dim=-1)
    channels = engine_convolution(
        mixed, (convolution_weight, convolution_bias), lengths, prefilled, module.activation
    )
    output = torch.empty(len(mixed), module.num_heads, module.head_dim, dtype=mixed.dtype)
    prompt, rest = prompt_and_rest(lengths, prefilled)
    starts = torch.tensor([0, *prefilled]).cumsum(0).to(torch.int32)
    # contiguous, because vLLM's kernel writes by address
    prompt_output = output.new_empty(len(prompt), *output.shape[1:])
    x, b, c = _split(module, channels[prompt])
    state_dtype = module.get_state_dtype()[1]
    final = mamba_chunk_scan_combined_varlen(
        x,
        step[prompt],
        decay,
        b,
        c,
        chunk_size=_CHUNK,
        D=skip,
        dt_bias=bias,
        seq_idx=starts,
        cu_seqlens=starts,
        cu_chunk_seqlens=starts,
        last_chunk_indices=starts,
        dt_softplus=True,
        out=prompt_output,
        state_dtype=state_dtype,
    )
    output[prompt] = prompt_output
    if not len(rest):
        return output.flatten(1)
    # State 0 is not used, because vLLM's kernel skips it.
    states = F.pad(final, (0, 0, 0, 0, 0, 0, 1, 0))
    x, b, c = _split(module, channels[rest])
    rest_output = output.new_empty(len(rest), *output.shape[1:])
    counts = [length - count for length, count in zip(lengths, prefilled, strict=True)]
    index = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    selective_state_update(
        states,
        x,
        step[rest][:, :, None].expand(-1, -1, module.head_dim),
        decay[:, None, None].expand(-1, module.head_dim, module.ssm_state_size),
        b,
        c,
        skip[:, None].expand(-1, module.head_dim),
        dt_bias=bias[:, None].expand(-1, module.head_dim),
        dt_softplus=True,
        state_batch_indices=index,
        dst_state_batch_indices=index,
        out=rest_output,
        # the kernel takes each sequence's tokens one after the other, and rounds the state between
        cu_seqlens=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
    )
    output[rest] = rest_output
    return output.flatten(1)


def _split(module: Any, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [S, H, P], B and C [S, G, D] of the convolution's results [S, C]."""
    sizes = [module.intermediate_size, *[module.groups_ssm_state_size] * 2]
    x, b, c = channels.split(sizes, dim=-1)
    groups = module.n_groups
    return (
        x.unflatten(-1, (module.num_heads, module.head_dim)),
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
    )


def formula(module: Any, rows: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    """Return the output of one sequence in torch's operators, fp32 [S, H·P].

    module, rows, weights: see `recurrence_of`, here in fp32.
    """
    *convolution_weights, log_decay, skip, bias = weights
    mixed, step = rows[0].split([module.conv_dim, module.num_heads], dim=-1)
    x, b, c = _split(module, F.silu(convolution(mixed, convolution_weights)))
    heads = module.num_heads // module.n_groups
    b, c = (t.repeat_interleave(heads, dim=1) for t in (b, c))
    step = F.softplus(step + bias)
    x, b, c = (t.transpose(0, 1) for t in (x, b, c))
    scanned = scan(x * step.T[..., None], b, c, -log_decay.exp()[:, None] * step.T)
    return (scanned + skip[:, None, None] * x).transpose(0, 1).flatten(1)


def scan(x: Tensor, b: Tensor, c: Tensor, g: Tensor) -> Tensor:
    """Return the outputs of the recurrence from an empty state, chunk by chunk: [H, S, P].

    Args:
        x: inputs, times their step, [H, S, P].
        b: keys [H, S, D].
        c: queries [H, S, D].
        g: logarithm of the decay, at most 0, [H, S].
    """
    tokens = x.shape[1]
    # What is padded writes nothing and decays nothing.
    padding = -tokens % _CHUNK
    x, b, c = (F.pad(t, (0, 0, 0, padding)).unflatten(1, (-1, _CHUNK)) for t in (x, b, c))
    total = F.pad(g, (0, padding)).unflatten(1, (-1, _CHUNK)).cumsum(-1)  # [H, c, T]
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    within = (between * (c @ b.transpose(-1, -2))) @ x
    remaining = (total[..., -1:] - total).exp()[..., None] * b
    written = x.transpose(-1, -2) @ remaining  # [H, c, P, D]
    seen = total.exp()[..., None] * c
    state = torch.zeros_like(written[:, 0])
    outputs = []
    # Unbound once: the gradient of a chunk taken by its index has the size of all chunks.
    chunks = (within, seen, written, total[..., -1, None, None].exp())
    for own, query, new, decay in zip(*(t.unbind(1) for t in chunks), strict=True):
        outputs.append(own + query @ state.transpose(-1, -2))
        state = decay * state + new
    return torch.cat(outputs, dim=1)[:, :tokens]
