"""The log-probs of a batch's rows, whose micro-batches are distributed over the processes.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch, micro_batches
from qarl.learner.logprobs import packs, shares_prompts, token_logprobs
from qarl.learner.optim.loss_scale import require_finite_logprobs
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs
from qarl.quant.graph.packing import Packed
from qarl.quant.layers.context import Forward
from qarl.quant.model.low_bit_model import LowBitModel


@dataclass(frozen=True)
class Part:
    """One micro-batch of a process."""

    index: torch.Tensor
    """Its rows, int64 [n]."""
    counts: bool
    """Whether it counts. False for a dummy micro-batch, which a process runs so that
    collectives match.
    """
    chunks: int | None
    """Number of calls of the output head, the same in every process; None if there is one
    process.
    """


class Scorer:
    """Computes log-probs by the policy, or by another model with its configuration.

    temperature: sampling temperature of the completions.
    """

    def __init__(
        self,
        model: LowBitModel,
        config: LearnerConfig,
        processes: Processes,
        temperature: float,
    ):
        self._model = model
        self._config = config
        self._processes = processes
        self._temperature = temperature
        self.packed = packs(model, config.packing)
        """Whether sequences are packed."""
        self._shares_prompts = shares_prompts(self.packed, config.share_prompts, model.device)

    @torch.no_grad()
    def add(self, to: RowLogprobs, model: LowBitModel, index: torch.Tensor) -> None:
        """Compute the log-probs of the rows at `index`, if any.

        model: the policy or the reference.
        """
        if not len(index):
            return
        for part in self.share(to.batch, index):
            rows = to.batch.rows(part.index).to(model.device)
            values, entropies = self.token_logprobs(model, rows, part.chunks, entropy=True)
            if part.counts:
                to.add(part.index, values, entropies)
        self.complete(to, model, index)

    @torch.no_grad()
    def complete(self, to: RowLogprobs, model: LowBitModel, index: torch.Tensor) -> None:
        """Sum what the processes added.

        Raises `PrecisionError` if log-probs of the rows at `index` are not finite.
        """
        to.complete(index, self._processes)
        require_finite_logprobs(to.batch, index, to.values, model.context.forward_dtype)

    def share(self, batch: Batch, index: torch.Tensor) -> Iterator[Part]:
        """Yield this process's micro-batches of the rows at `index`.

        Micro-batches are dealt out in turn. Every process gets the same number: one without a
        micro-batch in the last turn gets a dummy.
        """
        budget = self._config.micro_batch_tokens
        parts = list(micro_batches(batch, index, budget, self.packed, self._shares_prompts))
        rank = self._processes.rank
        world = self._processes.world
        for start in range(0, len(parts), world):
            turn = parts[start : start + world]
            counts = rank < len(turn)
            longest = max(int(batch.response_mask[part].sum()) for part in turn)
            chunks = None if world == 1 else -(-longest // self._config.logprob_chunk_tokens)
            yield Part(turn[rank if counts else 0], counts, chunks)

    def token_logprobs(
        self, model: LowBitModel, rows: Batch, chunks: int | None, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of these rows, and their entropies if `entropy`.

        They are those of `logprobs.token_logprobs`. chunks: number of calls of the output head.
        """
        return token_logprobs(
            model,
            rows.tokens,
            rows.response_mask,
            experts=rows.experts,
            packed=self.packed_rows(rows),
            pictures=rows.pictures,
            chunk_tokens=self._config.logprob_chunk_tokens,
            entropy=entropy,
            chunks=chunks,
            temperature=self._temperature,
        )

    def packed_rows(self, rows: Batch) -> Packed | None:
        """Return how these rows are packed into one; None if they are padded."""
        return rows.packed(self._shares_prompts) if self.packed else None

    def add_ratio_logprobs(
        self, to: RowLogprobs, index: torch.Tensor, model: LowBitModel | None = None
    ) -> None:
        """Compute the log-probs of the rows at `index` for a ratio.

        Under `learner.ratio_fix` they are those of the published codes, otherwise the same as in
        `add`. model: default the policy.
        """
        published = self._config.ratio_fix == "shadow_forward"
        model = model or self._model
        with model.forward_as(Forward.PUBLISHED) if published else nullcontext():
            self.add(to, model, index)
