"""The step-0 gate: on the first batch, before any update, learner and sampler must be the same
policy.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qarl.configs.errors import QarlError
from qarl.learner.mismatch import Mismatch
from qarl.sync.floor import describe_tolerance


class GateError(QarlError, heading="gate"):
    """The first batch shows two policies; training would start off-policy."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Holds the first batch to bounds, in nats.

    bound: on mean |log w|. k3_bound: on the k3 estimate of KL(sampler ‖ learner). Where one is None
    it is `tolerance` times what two right implementations are apart on the same batch; of k3, which
    is quadratic, its square times.
    """

    bound: float | None = None
    k3_bound: float | None = None
    tolerance: float

    def __call__(self, mismatch: Mismatch, floor: Callable[[], Mismatch]) -> None:
        """Raise `GateError` beyond a bound; NaN is beyond any.

        floor: measures how far two right implementations are apart on the batch. All processes call
        it or none, and none where the log-probs are equal.
        """
        if mismatch.max_abs == 0:
            return
        measured = floor() if self.bound is None or self.k3_bound is None else None
        bound, k3_bound, explained = self.bound, self.k3_bound, ""
        if measured is not None:
            explained = f" ({describe_tolerance(self.tolerance)})"
            bound = self.tolerance * measured.mean_abs_log_w if bound is None else bound
            k3_bound = self.tolerance**2 * abs(measured.k3) if k3_bound is None else k3_bound
        assert bound is not None
        assert k3_bound is not None
        values = (
            ("mean |log w|", mismatch.mean_abs_log_w, bound),
            ("k3-KL", abs(mismatch.k3), k3_bound),
        )
        for name, value, limit in values:
            if not value <= limit:
                raise GateError(
                    f"step-0 gate: {name} between learner and sampler is {value:.4g}, above the"
                    f" bound {limit:.4g}{explained}; they are not the same policy. See the audit"
                    " table for a differing kernel, or set sync.gate_bound and sync.gate_k3_bound"
                    " if this mismatch is intended (learner.aligned false skips the gate)"
                )


def require_equal(mismatch: Mismatch, floor: Callable[[], Mismatch]) -> None:
    """Raise `GateError` unless every token's log-probs are equal to the last bit, as `bitwise`
    asks.
    """
    if mismatch.max_abs != 0:  # NaN too
        raise GateError(
            f"step-0 gate: bitwise, and {mismatch.equal:.2%} of the sampled tokens have equal"
            f" log-probs in learner and sampler, the farthest {mismatch.max_abs:.4g} nats apart;"
            " another scheme or dtype may be equal (docs/explain/cuda.md), or leave bitwise out"
        )
