"""The publisher: it writes weight versions into the engine, and verifies every claim about them.

The engine gets the bytes that the forward used. A learner in the engine's process multiplies with
the engine's own layers (`Publisher.share_layers`). The codes are then written into them whenever
they are made, after every update, and publishing only verifies the last ones. Otherwise publishing
writes them.

Three things are verified:

1. The stream's digest is the same on both ends.
2. The engine has every layer of the stream, and each of its layers got all its tensors.
3. At the first publish, and at every `canary_every`-th, the engine's log-probs of fixed sequences
   are compared with the learner's. The learner uses layers of its own for that, because shared
   layers would agree with themselves.

Any failure raises `PublishError`: the run stops rather than train on samples of another policy.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from qarl.configs.errors import QarlError
from qarl.configs.words import few
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.learner.optim.loss_scale import require_finite_scores
from qarl.learner.processes import Processes
from qarl.quant.digest import StreamDigest
from qarl.quant.kernels import KernelError
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.rollout.engine import SamplingEngine
from qarl.sync.floor import OTHER_KERNELS_TOLERANCE, FixedSequences, describe_tolerance


class PublishError(QarlError, heading="publish"):
    """The engine does not hold what was published."""


@dataclass(frozen=True)
class Publish:
    """One version that the engine holds, verified."""

    version: int
    """Number of the weight version."""
    digest: str
    """Digest of the stream, in hexadecimal."""
    tensors: int
    """Number of tensors in the stream."""
    bytes: int
    """Size of the stream in bytes."""
    seconds: float
    """Wall time of writing and verifying, without the canary."""
    canary: Mismatch | None = None
    """Mismatch of learner and engine on the fixed sequences; None if this publish had no canary."""

    @property
    def canary_mean_abs(self) -> float | None:
        """Mean |Δ log p| of the canary, in nats; None if this publish had none."""
        return None if self.canary is None else self.canary.mean_abs


class Publisher:
    """Publishes one model into one engine.

    Args:
        sequences: token ids of the canary's fixed sequences, at least two tokens each. If there are
            none, there is no canary.
        bound: bound on the canary's mean |Δ log p|, in nats; 0 if all must be equal (`bitwise`).
            None: twice the floor (`sync.floor`), or the multiple that `set_tolerance` sets.
        canary_every: number of publishes between canaries.
        processes: the processes that publish together, each into its own engine. Default: this one.
    """

    def __init__(
        self,
        model: LowBitModel,
        engine: SamplingEngine,
        sequences: Sequence[Sequence[int]],
        bound: float | None,
        canary_every: int,
        processes: Processes | None = None,
    ):
        self._model = model
        self._engine = engine
        self._sequences = [list(s) for s in sequences]
        self._fixed = FixedSequences(model, sequences) if sequences else None
        """The canary's sequences; None without a canary."""
        self._bound = bound
        self._tolerance = OTHER_KERNELS_TOLERANCE
        """Multiple of the floor that bounds canaries."""
        self._canary_every = canary_every
        self._processes = processes or Processes()
        self._published = 0
        """Number of publishes so far."""
        self._version = 0
        """Version published last."""
        self._written: Publish | None = None
        """Version that is written into shared layers, but not published yet."""

    def share_layers(self) -> None:
        """Make the learner multiply with the engine's own layers.

        This saves a second copy of the weights. Every version is then written into the engine when
        it is made. Raises `KernelError`, and changes nothing, if learner and engine do not have the
        same layers in one process.
        """
        layers = self._engine.shared_layers()
        if layers is None:
            raise KernelError("the engine's layers are in another process")
        self._model.multiply_with(layers)
        self._model.on_refresh(self._write_ahead)

    def set_tolerance(self, tolerance: float) -> None:
        """Set the multiple of the floor that bounds canaries from now on, if no bound was given."""
        self._tolerance = tolerance

    def unshare_layers(self) -> None:
        """Stop using the engine's layers. The learner makes its own when it needs them."""
        self._model.multiply_with(None)
        self._model.on_refresh(None)

    def publish(self, version: int) -> Publish:
        """Let the engine sample from the model's present tensors, and verify them.

        version: number of the weight version.
        """
        start = time.perf_counter()
        ahead = self._written
        self._written = None
        written = ahead if ahead is not None and ahead.version == version else self._write(version)
        digests = self._processes.all_gather(written.digest)
        self._check(
            len(set(digests)) == 1,
            version,
            f"the processes materialized different tensors: {_differing_digests(digests)}",
        )
        # Writing ahead took its time before this call.
        seconds = time.perf_counter() - start + (written.seconds if written is ahead else 0.0)
        due = bool(self._sequences) and self._published % self._canary_every == 0
        self._published += 1
        self._version = version
        canary = self.canary(version) if due else None
        return replace(written, seconds=seconds, canary=canary)

    def _write_ahead(self) -> None:
        """Write the next version into shared layers when it is made."""
        self._written = None
        self._written = self._write(self._version + 1)

    def _write(self, version: int) -> Publish:
        """Send the model's present tensors, and verify that they arrived."""
        start = time.perf_counter()
        digest = StreamDigest()
        report = self._engine.load(digest.over(self._model.low_bit_tensors()), version)
        self._check(
            report.digest == digest.hexdigest(),
            version,
            "the engine received other bytes than were sent",
        )
        self._check(
            not report.unconsumed,
            version,
            f"no engine layer took {few(report.unconsumed)}",
        )
        self._check(
            not report.missing,
            version,
            f"the engine expected more tensors for {few(report.missing)}",
        )
        return Publish(
            version=version,
            digest=digest.hexdigest(),
            tensors=digest.tensors,
            bytes=digest.bytes,
            seconds=time.perf_counter() - start,
        )

    def canary(self, version: int) -> Mismatch:
        """Compare all replicas' log-probs of fixed sequences, and return the largest mismatch.

        Raises `PublishError` beyond the bound, and `PrecisionError` if log-probs are not finite,
        because a bound says nothing about them.
        """
        assert self._fixed is not None
        learner = self._fixed.logprobs()
        mask = self._fixed.response_mask
        dtype = self._model.context.dtype
        require_finite_scores(learner, mask, "the learner's canary", dtype)
        mismatches: list[Mismatch] = []
        for logprobs in self._engine.logprobs_of_each(self._sequences):
            sampler = pad_sequence([torch.tensor(row) for row in logprobs], batch_first=True)
            require_finite_scores(sampler, mask, "the engine's canary", dtype)
            mismatches.append(measure_mismatch(learner, sampler, mask))
        # One process measures the floor only if all do: they may share codes.
        differs = self._processes.any(any(mismatch.max_abs != 0 for mismatch in mismatches))
        bound, explained = self._canary_bound() if differs else (0.0, "")
        for mismatch in mismatches:
            self._check(
                mismatch.mean_abs <= bound,  # False for NaN too
                version,
                f"the canary's mean |Δ log p| between learner and engine is {mismatch.mean_abs:.4g}"
                f" nats, above the bound {bound:.4g} ({explained})",
            )
        return max(mismatches, key=lambda mismatch: mismatch.mean_abs)

    def _canary_bound(self) -> tuple[float, str]:
        """Return the bound in nats, and its origin in words."""
        if self._bound is not None:
            return self._bound, "sync.canary_bound" if self._bound else "bitwise"
        assert self._fixed is not None
        words = f"{describe_tolerance(self._tolerance)}; sync.canary_bound sets another"
        return self._tolerance * self._fixed.floor().mean_abs, words

    def _check(self, holds: bool, version: int, problem: str) -> None:
        """Raise `PublishError` with the problem unless `holds`."""
        if not holds:
            raise PublishError(
                f"publish of weight version {version} failed: {problem}; the run stops here"
            )


def _differing_digests(digests: Sequence[str]) -> str:
    """Return the digests of process 0 and of the first process that differs from it, in words."""
    differing = (rank for rank, digest in enumerate(digests) if digest != digests[0])
    rank = next(differing, 0)
    return f"digest {digests[0][:16]}… in process 0, {digests[rank][:16]}… in process {rank}"
