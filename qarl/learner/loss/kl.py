"""KL penalty on the distance to a reference policy: the one that the run started with, in the same
scheme.

With d = log π_ref - log π_cur on sampled tokens, these estimate KL(π_cur ‖ π_ref) (Schulman,
"Approximating KL divergence", 2020):

    k1 = -d             unbiased, high variance
    k2 = d²/2           biased
    k3 = e^d - 1 - d    unbiased, never negative

What matters in a loss is the gradient. The gradient of k2 is -d ∇log π_cur, an unbiased gradient of
the KL. The gradient of k1 is ∇log π_cur, whose expectation is zero, so k1 by itself would penalize
nothing; here it has its own value and the gradient of k2. The gradient of k3 is that of the reverse
direction, KL(π_ref ‖ π_cur) (used by GRPO, arXiv 2402.03300, eq. 4). All of them treat tokens as
sampled from π_cur; the drift within a batch is not corrected.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import torch


def kl_estimate(
    current: torch.Tensor,
    reference: torch.Tensor,
    response_mask: torch.Tensor,
    kind: str,
) -> torch.Tensor:
    """Return the estimate in nats a token, fp32 [B, T-1], zero outside the response.

    Args:
        current: log-probs by the policy, fp32 [B, T-1], with gradient.
        reference: log-probs by the reference policy, fp32 [B, T-1], without gradient.
        response_mask: bool [B, T-1].
        kind: "k1", "k2" or "k3".
    """
    d = (reference - current) * response_mask
    if kind == "k3":
        return d.expm1() - d
    k2 = d.square() / 2
    return k2 if kind == "k2" else k2 + (-d - k2).detach()
