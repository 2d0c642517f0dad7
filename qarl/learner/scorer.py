"""Log-probs of a batch's rows: micro-batches dealt to the processes, and what each computed put
together.

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
    """One micro-batch of a process. index: its rows, int64 [n]. counts: False for a dummy
    micro-batch, run so that ZeRO's collectives match. chunks: how often the output head is called,
    in every process; None where there is one process.
    """

    index: torch.Tensor
    counts: bool
    chunks: int | None


class Scorer:
    """Computes log-probs by the policy, or by another model with its configuration. temperature:
    that completions are sampled at. packed: whether sequences are.
    """

    def __init__(
        self,
        model: LowBitModel,
        config: LearnerConfig,
        processes: Processes,
        temperature: float,
    ):
        self._model, self._config = model, config
        self._processes, self._temperature = processes, temperature
        self.packed = packs(model, config.packing)
        self._shares_prompts = shares_prompts(self.packed, config.share_prompts, model.device)

    @torch.no_grad()
    def add(self, to: RowLogprobs, model: LowBitModel, index: torch.Tensor) -> None:
        """Compute the log-probs of the rows at `index`, if any. model: the policy or the
        reference.
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
        """Put together what the processes added; raise `PrecisionError` where the rows at `index`
        are not finite.
        """
        to.complete(index, self._processes)
        require_finite_logprobs(to.batch, index, to.values, model.context.forward_dtype)

    def share(self, batch: Batch, index: torch.Tensor) -> Iterator[Part]:
        """This process's micro-batches of the rows at `index`, dealt out in turn: as many for every
        process.
        """
        budget = self._config.micro_batch_tokens
        parts = list(micro_batches(batch, index, budget, self.packed, self._shares_prompts))
        rank, world = self._processes.rank, self._processes.world
        for start in range(0, len(parts), world):
            dealt = parts[start : start + world]
            most = max(int(batch.response_mask[part].sum()) for part in dealt)
            chunks = None if world == 1 else -(-most // self._config.logprob_chunk_tokens)
            yield Part(dealt[rank if rank < len(dealt) else 0], rank < len(dealt), chunks)

    def token_logprobs(
        self, model: LowBitModel, rows: Batch, chunks: int | None, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of these rows, and their entropies if asked for, as `logprobs.token_logprobs`. chunks: of
        the output head.
        """
        how = (
            self.packed_rows(rows),
            self._config.logprob_chunk_tokens,
            entropy,
            chunks,
            self._temperature,
        )
        return token_logprobs(model, rows.tokens, rows.response_mask, rows.experts, *how)

    def packed_rows(self, rows: Batch) -> Packed | None:
        """How these rows are packed into one; None where they are padded."""
        return rows.packed(self._shares_prompts) if self.packed else None

    def add_ratio_side(
        self, to: RowLogprobs, index: torch.Tensor, model: LowBitModel | None = None
    ) -> None:
        """The log-probs of the published codes, where ratios are of those (`learner.ratio_fix`),
        else as above.
        """
        published, model = (
            self._config.ratio_fix == "shadow_forward",
            model or self._model,
        )
        with model.forward_as(Forward.PUBLISHED) if published else nullcontext():
            self.add(to, model, index)
