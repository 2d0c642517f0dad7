"""The step-0 gate: on the first batch, before any update, learner and sampler must be the same policy."""

from qarl.configs.errors import QarlError
from qarl.learner.mismatch import Mismatch


class GateError(QarlError, heading="gate"):
    """The first batch shows two policies; training would start off-policy."""


def require_same_policy(mismatch: Mismatch, bound: float, k3_bound: float) -> None:
    """Raise `GateError` unless mean |log w| ≤ bound and |k3| ≤ k3_bound (both in nats; NaN fails)."""
    for name, value, limit in (("mean |log w|", mismatch.mean_abs_log_w, bound), ("k3-KL", abs(mismatch.k3), k3_bound)):
        if not value <= limit:
            raise GateError(
                f"step-0 gate: {name} between learner and sampler is {value:.4g}, above the bound {limit:.4g}; they "
                "are not the same policy. See the audit table for a differing kernel, or raise sync.gate_bound / "
                "sync.gate_k3_bound if this mismatch is intended (learner.aligned false skips the gate)"
            )


def require_equal(mismatch: Mismatch) -> None:
    """Raise `GateError` unless every token's log-probs are equal to the last bit, as `bitwise` asks."""
    if mismatch.max_abs != 0:  # NaN too
        raise GateError(
            f"step-0 gate: bitwise, and {mismatch.equal:.2%} of the sampled tokens have equal log-probs in learner and "
            f"sampler, the farthest {mismatch.max_abs:.4g} nats apart; another scheme or dtype may be equal "
            "(docs/explain/cuda.md), or leave bitwise out"
        )
