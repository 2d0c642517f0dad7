"""KL penalty on the distance to a reference policy, here the one the run started with, in the same
scheme.

With d = log π_ref - log π_cur on sampled tokens, estimators of KL(π_cur ‖ π_ref) (Schulman,
"Approximating KL divergence", 2020):

    k1 = -d   unbiased, high variance        k2 = d²/2   biased        k3 = e^d - 1 - d   unbiased,
    never negative

As a loss, what counts is the gradient. k2's is -d ∇log π_cur, an unbiased gradient of the KL; k1's
own is ∇log π_cur, whose expectation is zero, so it would penalize nothing. Here k1 has its own
value and k2's gradient. k3's gradient is that of the reverse direction, KL(π_ref ‖ π_cur) (GRPO,
arXiv 2402.03300, eq. 4, uses it). All take tokens as drawn from π_cur; the drift within a batch is
not corrected for.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import torch


def kl_estimate(
    current: torch.Tensor,
    reference: torch.Tensor,
    response_mask: torch.Tensor,
    kind: str,
) -> torch.Tensor:
    """Nats a token, fp32 [B, T-1], zero outside the response. current: with gradient; reference:
    without.

    kind: "k1", "k2" or "k3".
    """
    d = (reference - current) * response_mask
    if kind == "k3":
        return d.expm1() - d
    k2 = d.square() / 2
    return k2 if kind == "k2" else k2 + (-d - k2).detach()
