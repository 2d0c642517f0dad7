"""The step-0 gate: on the first batch, before any update, learner and sampler must be the same
policy.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qarl.configs.errors import QarlError
from qarl.learner.mismatch import Mismatch
from qarl.sync.floor import describe_tolerance


class GateError(QarlError, heading="gate"):
    """Learner and sampler are two policies on the first batch, so training would start
    off-policy.
    """


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Check of the first batch's mismatch against bounds, in nats."""

    bound: float | None = None
    """Bound on mean |log w|. Default: `tolerance` times the floor of the batch. The k3 estimate of
    KL(sampler ‖ learner) is then bounded too, by the square of `tolerance` times its floor, because
    k3 is quadratic.
    """
    tolerance: float
    """Multiple of the floor by which learner and sampler may differ. The floor is how far two
    correct implementations differ on the same batch.
    """

    def __call__(self, mismatch: Mismatch, floor: Callable[[], Mismatch]) -> None:
        """Raise `GateError` beyond a bound. NaN is beyond any bound.

        floor: measures how far two correct implementations differ on the batch. All processes call
        it or none. It is not called if the log-probs are equal.
        """
        if mismatch.max_abs == 0:
            return
        if self.bound is not None:
            explained = ""
            limits = [("mean |log w|", mismatch.mean_abs_log_w, self.bound)]
        else:
            explained = f" ({describe_tolerance(self.tolerance)})"
            measured = floor()
            limits = [
                ("mean |log w|", mismatch.mean_abs_log_w, self.tolerance * measured.mean_abs_log_w),
                ("k3-KL", abs(mismatch.k3), self.tolerance**2 * abs(measured.k3)),
            ]
        for name, value, limit in limits:
            if not value <= limit:  # NaN too
                raise GateError(
                    f"step-0 gate: {name} between learner and sampler is {value:.4g}, above the"
                    f" bound {limit:.4g}{explained}; they are not the same policy. See the audit"
                    " table for a differing kernel, or set sync.gate_bound if this mismatch is"
                    " intended (learner.aligned false skips the gate)"
                )


def require_equal_logprobs(mismatch: Mismatch, floor: Callable[[], Mismatch]) -> None:
    """Raise `GateError` unless every token's log-probs are equal to the last bit.

    `bitwise` asks for that.
    """
    if mismatch.max_abs != 0:  # NaN too
        raise GateError(
            f"step-0 gate: bitwise, and {mismatch.equal:.2%} of the sampled tokens have equal"
            f" log-probs in learner and sampler, the farthest {mismatch.max_abs:.4g} nats apart;"
            " another scheme or dtype may be equal (docs/explain/cuda.md), or omit bitwise"
        )
