"""Log-probs of given tokens under a causal LM, computed as the engine's sampler computes them.

Logits are the largest tensor of a step, so they exist for one chunk of positions at a time. The
backward computes a chunk's logits again, so that none are stored between forward and backward.

Axes: B sequences, T tokens, n response tokens of all sequences, c of a chunk, V vocabulary, C
hidden columns.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qarl.configs.errors import ConfigError
from qarl.quant.graph.packing import Packed, PictureRows
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.cpu_blocks import row_blocks


def token_logprobs(
    model: LowBitModel,
    tokens: Tensor,
    response_mask: Tensor,
    *,
    experts: Tensor | None = None,
    packed: Packed | None = None,
    pictures: PictureRows | None = None,
    chunk_tokens: int = 512,
    entropy: bool = True,
    chunks: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of tokens[:, 1:], and entropies of the distributions they were drawn from.

    Both are in nats, fp32 [B, T-1], and zero outside the response. The entropy has no gradient, and
    is zero throughout unless `entropy`. Logits are rounded to the compute dtype by the output head
    and normalized in fp32, as in vLLM.

    Args:
        tokens: int64 [B, T], padded on the right (attention is causal, so padding needs no mask).
        response_mask: positions wanted, bool [B, T-1]. Logits are computed for these alone.
        experts: see `LowBitModel.hidden`.
        packed: see `LowBitModel.hidden`.
        pictures: see `LowBitModel.hidden`.
        chunk_tokens: number of positions whose logits exist at a time.
        entropy: whether to compute entropies.
        chunks: number of chunks, instead of `chunk_tokens`. Processes that compute different rows
            must agree on it: if codes are not kept, all processes gather the head's together in
            each call.
        temperature: sampling temperature. Log-probs and entropy are of logits / temperature,
            divided in fp32, as in vLLM.
    """
    wanted = nn.functional.pad(response_mask, (0, 1))
    hidden = model.hidden(tokens, wanted, experts, packed, pictures)
    targets = tokens[:, 1:][response_mask]
    parts = _in_chunks(hidden, targets, chunk_tokens, chunks)
    # A single chunk is stored between forward and backward, rather than computed twice.
    recomputed = torch.is_grad_enabled() and len(parts) > 1
    if recomputed and hidden.requires_grad:
        model.gradients.defer_reductions(until=hidden)
    compute: Any = _chunk
    if recomputed:
        compute = partial(checkpoint, _chunk, use_reentrant=False, preserve_rng_state=False)
    computed = [compute(model.head, x, chosen, entropy, temperature) for x, chosen in parts]
    zeros = torch.zeros(response_mask.shape, dtype=torch.float32, device=tokens.device)
    # Cut off the positions that repeat the first one.
    picked = torch.cat([logprobs for logprobs, _ in computed])[: len(targets)]
    entropies = torch.cat([entropies for _, entropies in computed])[: len(targets)]
    return (
        zeros.masked_scatter(response_mask, picked),
        zeros.masked_scatter(response_mask, entropies),
    )


def _in_chunks(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, chunks: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Cut hidden [n, C] and targets [n] into chunks of `chunk_tokens`, or into `chunks` chunks.

    If there are fewer positions than `chunks`, the first position is repeated at the end.
    """
    if chunks is None:
        return list(zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    missing = max(0, chunks - len(targets))
    if missing:
        hidden = torch.cat([hidden, hidden[:1].expand(missing, -1)])
        targets = torch.cat([targets, targets[:1].expand(missing)])
    return list(zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True))


def packs(model: LowBitModel, setting: bool | Literal["auto"]) -> bool:
    """Return whether sequences are packed (`learner.packing`).

    Raises `ConfigError` if the setting is true and the model cannot pack.
    """
    if setting is True and model.operators != "engine":
        raise ConfigError(
            "learner.packing is true, but this model has transformers' operators, which would build"
            " a mask over all pairs of tokens; set learner.operators to 'engine' where the model"
            " allows, or learner.packing to auto"
        )
    return model.operators == "engine" if setting == "auto" else setting


def shares_prompts(packed: bool, setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Return whether a prompt is computed once for all its completions (`learner.share_prompts`).

    Raises `ConfigError` if the setting is true and sequences are not packed.
    """
    if setting is True and not packed:
        raise ConfigError(
            "learner.share_prompts is true, but sequences are not packed here; leave"
            " learner.packing at auto and learner.operators at 'engine' where the model allows, or"
            " set learner.share_prompts to auto"
        )
    return packed and device.type == "cpu" if setting == "auto" else setting


def _chunk(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    entropy: bool,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of one chunk, fp32 [c].

    hidden: compute dtype [c, C]. targets: int64 [c].
    """
    return _Normalized.apply(head(hidden), targets, entropy, temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in fp32; unchanged logits if the temperature is 1.

    The divisor is a tensor, because CUDA multiplies by the inverse of a number, and vLLM divides.
    """
    if temperature == 1.0:
        return logits
    return logits.float() / logits.new_tensor([temperature], dtype=torch.float32)


class _Normalized(torch.autograd.Function):
    """Log-probs and entropies of logits.

    It saves the logits in the compute dtype for the backward, while autograd would save them in
    fp32. Their gradient is rounded to that dtype, as autograd's is.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        picked, entropies = (
            torch.zeros(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(2)
        )
        for part, chosen, into, spread in row_blocks(logits, targets, picked, entropies):
            logp = _scaled(part, temperature).log_softmax(-1, dtype=torch.float32)
            into.copy_(logp.gather(-1, chosen[:, None])[:, 0])
            if entropy:
                spread.copy_(-(logp.exp().mul_(logp)).sum(-1))
        ctx.mark_non_differentiable(entropies)
        return picked, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        logits, targets = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for into, part, chosen, dy in row_blocks(
            dlogits, logits, targets[:, None], grad_outputs[0][:, None]
        ):
            # d log p / d logits = (1[chosen] - p) / temperature
            dy = _scaled(dy, ctx.temperature)
            p = _scaled(part, ctx.temperature).softmax(-1, dtype=torch.float32)
            into.copy_(p.mul_(-dy).scatter_add_(-1, chosen, dy))
        return dlogits, None, None, None
