"""Log-probs of given tokens under a causal LM, computed as the engine's sampler computes them.

Axes: B sequences, T tokens, V vocabulary.
"""

import torch

from quant.model import LowBitModel


def token_logprobs(
    model: LowBitModel, tokens: torch.Tensor, response: torch.Tensor, experts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of tokens[:, 1:] and entropy of the distribution each was drawn from, in nats.

    tokens: int64 [B, T], padded on the right (attention is causal, so padding needs no mask). response: bool
    [B, T-1], the positions wanted; logits are computed for these alone. experts: see `LowBitModel.logits`. Returns
    fp32 [B, T-1] twice, zero elsewhere; the entropy carries no gradient. Logits are rounded to the compute dtype by the
    output head and normalized in fp32, as in vLLM.
    """
    logits = model.logits(tokens, torch.nn.functional.pad(response, (0, 1)), experts).float()
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, tokens[:, 1:][response][:, None])[:, 0]
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    zeros = torch.zeros(response.shape, dtype=torch.float32, device=tokens.device)
    return zeros.masked_scatter(response, picked), zeros.masked_scatter(response, entropy)
