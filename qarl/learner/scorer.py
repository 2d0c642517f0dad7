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
class RankMicroBatch:
    """One micro-batch, as the rank computes it to which it is dealt."""

    index: torch.Tensor
    """Its rows in the batch, int64 [n]."""
    is_dummy: bool
    """Whether another rank computes these rows too. A rank without a micro-batch of its own runs a
    dummy, because every rank must call every collective; it adds nothing to results.
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

    def fill_for_ratio(
        self, into: RowLogprobs, index: torch.Tensor, model: LowBitModel | None = None
    ) -> None:
        """Compute the log-probs that a ratio takes of the rows at `index`, and write them.

        Under `learner.ratio_fix` they are those of the published codes, otherwise the same as in
        `fill`. model: default the policy.
        """
        published = self._config.ratio_fix == "shadow_forward"
        model = model or self._model
        with model.forward_as(Forward.PUBLISHED) if published else nullcontext():
            self.fill(into, index, model)

    @torch.no_grad()
    def fill(self, into: RowLogprobs, index: torch.Tensor, model: LowBitModel) -> None:
        """Compute the log-probs of the rows at `index`, if any, and write them in every process.

        model: the policy or the reference.
        """
        if not len(index):
            return
        for micro in self.micro_batches(into.batch, index):
            rows = into.batch.rows(micro.index).to(model.device)
            values, entropies = self.token_logprobs(model, rows, micro.chunks, entropy=True)
            if not micro.is_dummy:
                into.write(micro.index, values, entropies)
        self.all_reduce(into, index, model)

    @torch.no_grad()
    def all_reduce(self, into: RowLogprobs, index: torch.Tensor, model: LowBitModel) -> None:
        """Send the rows at `index` that the processes wrote to all of them.

        Raises `PrecisionError` if a log-prob of these rows is not finite.
        """
        into.all_reduce(index, self._processes)
        require_finite_logprobs(into.batch, index, into.values, model.context.forward_dtype)

    def micro_batches(self, batch: Batch, index: torch.Tensor) -> Iterator[RankMicroBatch]:
        """Yield this process's micro-batches of the rows at `index`.

        Micro-batches are dealt out in turn. Every process gets the same number: one without a
        micro-batch in the last turn gets a dummy.
        """
        budget = self._config.micro_batch_tokens
        dealt = list(micro_batches(batch, index, budget, self.packed, self._shares_prompts))
        rank = self._processes.rank
        world = self._processes.world
        for start in range(0, len(dealt), world):
            turn = dealt[start : start + world]
            is_dummy = rank >= len(turn)
            longest = max(int(batch.response_mask[rows].sum()) for rows in turn)
            chunks = None if world == 1 else -(-longest // self._config.logprob_chunk_tokens)
            yield RankMicroBatch(turn[0 if is_dummy else rank], is_dummy, chunks)

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
