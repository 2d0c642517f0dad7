"""One publish: the bytes the forward used go to the engine, and every claim about them is checked.

(1) the stream's digest is the same on both ends; (2) nothing sent is unconsumed, nothing expected is missing;
(3) at the first publish and every `canary_every`-th, the engine's log-probs of fixed sequences are compared with
the learner's. Any failure raises `PublishError`: the run stops rather than train on another policy's samples.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from configs.errors import QarlError
from learner.logprobs import token_logprobs
from learner.mismatch import Mismatch, measure_mismatch
from learner.processes import Processes
from quant.digest import StreamDigest
from quant.model.low_bit_model import LowBitModel
from quant.types import LowBitTensor
from rollout.engine import Engine


class PublishError(QarlError):
    """The engine does not hold what was published."""

    heading = "publish"


@dataclass(frozen=True)
class Publish:
    """One publish that was verified. digest: of the stream. canary: learner against engine on the fixed
    sequences, None where this publish had none."""

    version: int
    digest: str
    tensors: int
    bytes: int
    seconds: float
    canary: Mismatch | None


class Publisher:
    """Publishes one model into one engine.

    sequences: token ids of the canary's fixed sequences, at least two tokens each. bound: on the canary's mean
    |Δ log p|, in nats. canary_every: publishes between canaries. processes: those that publish together, each into its
    own engine.
    """

    def __init__(
        self,
        model: LowBitModel,
        engine: Engine,
        sequences: Sequence[Sequence[int]],
        bound: float,
        canary_every: int,
        processes: Processes | None = None,
    ):
        self._model = model
        self._engine = engine
        self._sequences = [list(s) for s in sequences]
        self._bound = bound
        self._canary_every = canary_every
        self._processes = processes or Processes()
        self._published = 0

    def publish(self, version: int) -> Publish:
        """Send the model's present tensors as weight version `version` and verify them."""
        start = time.perf_counter()
        digest = StreamDigest()
        report = self._engine.load(self._recorded(digest), version)
        self._check(report.digest == digest.hexdigest(), version, "the engine received other bytes than were sent")
        self._check(not report.unconsumed, version, f"no engine layer took {_some(report.unconsumed)}")
        self._check(not report.missing, version, f"the engine expected more tensors for {_some(report.missing)}")
        digests = self._processes.gathered(digest.hexdigest())
        self._check(len(set(digests)) == 1, version, f"the processes materialized different tensors: {_apart(digests)}")
        seconds = time.perf_counter() - start
        due = self._published % self._canary_every == 0
        self._published += 1
        canary = self.canary(version) if due else None
        return Publish(
            version=version,
            digest=digest.hexdigest(),
            tensors=digest.tensors,
            bytes=digest.bytes,
            seconds=seconds,
            canary=canary,
        )

    def canary(self, version: int) -> Mismatch:
        """Compare log-probs of the fixed sequences; raises `PublishError` beyond the bound."""
        scored = self._engine.logprobs(self._sequences)
        tokens, response_mask = _pad(self._sequences)
        sampler = torch.zeros(response_mask.shape)
        for row, logprobs in enumerate(scored):
            sampler[row, : len(logprobs)] = torch.tensor(logprobs)
        with torch.no_grad(), self._model.published_forward():
            device = self._model.device
            learner, _ = token_logprobs(self._model, tokens.to(device), response_mask.to(device))
        found = measure_mismatch(learner.cpu(), sampler, response_mask)
        within = found.mean_abs <= self._bound  # False for NaN too
        self._check(
            within,
            version,
            f"the canary's mean |Δ log p| between learner and engine is {found.mean_abs:.4g} nats, above the bound "
            f"{self._bound:.4g} (sync.canary_bound)",
        )
        return found

    def _recorded(self, digest: StreamDigest) -> Iterator[LowBitTensor]:
        for item in self._model.low_bit_tensors():
            digest.update(item)
            yield item

    def _check(self, holds: bool, version: int, problem: str) -> None:
        if not holds:
            raise PublishError(f"publish of weight version {version} failed: {problem}; the run stops here")


def _pad(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens int64 [B, T] padded with 0 on the right, and which of tokens[:, 1:] are real, bool [B, T-1]."""
    longest = max(map(len, sequences))
    tokens = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    lengths = torch.tensor([len(s) for s in sequences])
    return tokens, torch.arange(1, longest)[None] < lengths[:, None]


def _apart(digests: Sequence[str]) -> str:
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), 0)
    return f"digest {digests[0][:16]}… in process 0, {digests[other][:16]}… in process {other}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
