"""Log-probs of given tokens under a causal LM, computed as the engine's sampler computes them.

Logits are the largest tensor of a step, and no more than a chunk of positions has them at a time:
the backward computes a chunk's logits again, so that between forward and backward none are kept.

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
from qarl.quant.graph.packing import Packed
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.cpu_blocks import row_blocks


def token_logprobs(
    model: LowBitModel,
    tokens: Tensor,
    response_mask: Tensor,
    experts: Tensor | None = None,
    packed: Packed | None = None,
    chunk_tokens: int = 512,
    entropy: bool = True,
    chunks: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of tokens[:, 1:] and entropy of the distribution each was drawn from, in nats.

    tokens: int64 [B, T], padded on the right (attention is causal, so padding needs no mask).
    response_mask: bool [B, T-1], the positions wanted; logits are computed for these alone.
    experts, packed: see `LowBitModel.hidden`. chunk_tokens: positions whose logits are held at
    once. Returns fp32 [B, T-1] twice, zero elsewhere; the entropy has no gradient and is zero
    throughout where it is not asked for. Logits are rounded to the compute dtype by the output head
    and normalized in fp32, as in vLLM. chunks: call the output head on this many parts instead,
    which processes that compute different rows have to agree on (where codes are not kept, all make
    the head's together each time). temperature: of sampling; log-probs and entropy are of logits /
    temperature, divided in fp32, as in vLLM.
    """
    hidden = model.hidden(tokens, nn.functional.pad(response_mask, (0, 1)), experts, packed)
    targets = tokens[:, 1:][response_mask]
    parts = _in_chunks(hidden, targets, chunk_tokens, chunks)
    # One chunk is held between forward and backward rather than computed twice.
    again = torch.is_grad_enabled() and len(parts) > 1
    if again and hidden.requires_grad:
        model.gradients.add_up(until=hidden)
    compute: Any = (
        partial(checkpoint, _chunk, use_reentrant=False, preserve_rng_state=False)
        if again
        else _chunk
    )
    computed = [compute(model.head, x, chosen, entropy, temperature) for x, chosen in parts]
    zeros = torch.zeros(response_mask.shape, dtype=torch.float32, device=tokens.device)
    whole = (torch.cat(values)[: len(targets)] for values in zip(*computed, strict=True))
    picked, entropies = (zeros.masked_scatter(response_mask, values) for values in whole)
    return picked, entropies


def _in_chunks(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, chunks: int | None
) -> list[tuple[Tensor, Tensor]]:
    """hidden [n, C] and targets [n] in runs of `chunk_tokens`, or in exactly `chunks` runs; the
    first position is then repeated at the end where there are fewer positions than runs.
    """
    if chunks is None:
        return list(zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    missing = max(0, chunks - len(targets))
    if missing:
        hidden = torch.cat([hidden, hidden[:1].expand(missing, -1)])
        targets = torch.cat([targets, targets[:1].expand(missing)])
    return list(zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True))


def packs(model: LowBitModel, setting: bool | Literal["auto"]) -> bool:
    """Whether sequences are packed (`learner.packing`). Raises `ConfigError` for true where the
    model cannot.
    """
    if setting is True and model.operators != "engine":
        raise ConfigError(
            "learner.packing is true, but this model has transformers' operators, which would build"
            " a mask over all pairs of tokens; set learner.operators to 'engine' where the model"
            " allows, or learner.packing to auto"
        )
    return model.operators == "engine" if setting == "auto" else setting


def shares_prompts(packed: bool, setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Whether a prompt is computed once for all its completions (`learner.share_prompts`). Raises
    `ConfigError` where that is asked for and sequences are not packed.
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
    """hidden: compute dtype [c, C]; targets: int64 [c] → log-probs and entropies, fp32 [c]."""
    return _Normalized.apply(head(hidden), targets, entropy, temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in fp32, by a tensor: by a number CUDA multiplies with its inverse, and
    vLLM divides.
    """
    return (
        logits
        if temperature == 1.0
        else logits.float() / logits.new_tensor([temperature], dtype=torch.float32)
    )


class _Normalized(torch.autograd.Function):
    """Log-probs and entropies out of logits. Kept for the backward: the logits in the compute
    dtype, which autograd would keep in fp32; their gradient is rounded to that dtype, as autograd's
    is.
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
