"""The rounding floor: how far two correct implementations of a model differ.

Bounds on the difference of learner and engine are multiples of it. Two implementations that
multiply the same codes in the same dtype add in different orders, and so round differently. The
effect depends on the model. A narrow one of two layers differs by a thousandth of a nat a token,
SmolLM2-135M by 0.05 in bfloat16, and by 0.2 with int8 activations, whose codes flip. So a run
measures its own model: the same sequences are scored twice, the second time with every product's
results changed at random by up to one unit in the last place.

Measured with SmolLM2-135M in w8a8: the plain and the changed forward differ by 0.24 nats a token,
and a learner with transformers' operators, which is correct, is 0.23 from the engine. With the rows
of one layer's values permuted it is 3.5.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from qarl.learner.logprobs import packs, token_logprobs
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.quant.graph.packing import pack_prompts
from qarl.quant.layers.context import Forward
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.row_check import RowCheck

OTHER_KERNELS_TOLERANCE = 2.0
"""Multiple of the floor by which a correct implementation with other operators or kernels may
differ.
"""
SAME_KERNELS_TOLERANCE = 0.1
"""Multiple of the floor by which it may differ if learner and engine have the same kernels, and
each kernel computes a row independently of other rows. Equality is expected then. A fault as small
as one step's update changes log-probs as much as other roundings do, so a tenth of the floor
reveals it. It leaves room for cases that nobody tried.
"""
OTHER_ROUNDINGS_SEED = 65
"""Seed of the random changes to products."""


class FixedSequences:
    """Fixed sequences, scored by the published codes with layers of the learner's own.

    sequences: token ids, at least two each.
    """

    def __init__(self, model: LowBitModel, sequences: Sequence[Sequence[int]]):
        self._model = model
        self.tokens = pad_sequence(
            [torch.tensor(sequence) for sequence in sequences], batch_first=True
        )
        """Token ids, int64 [B, T], padded on the right."""
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        self.response_mask = torch.arange(1, self.tokens.shape[1])[None] < lengths[:, None]
        """Positions whose next token is scored, bool [B, T-1]: all but padding."""
        self._packed = pack_prompts(lengths, self.tokens.shape[1])
        """All sequences in one row, which the engine computes whole, as prompts."""
        self._floor: Mismatch | None = None

    @torch.no_grad()
    def logprobs(self) -> torch.Tensor:
        """Return log-probs of every token but each sequence's first, fp32 [B, T-1], on the CPU."""
        model = self._model
        tokens = self.tokens.to(model.device)
        mask = self.response_mask.to(model.device)
        packed = self._packed if packs(model, "auto") else None
        with model.forward_as(Forward.PUBLISHED), model.context.own_kernels():
            logprobs, _ = token_logprobs(model, tokens, mask, packed=packed, entropy=False)
        return logprobs.cpu()

    def floor(self) -> Mismatch:
        """Return how far two correct implementations differ on these sequences.

        The first call measures it by two forwards. Collective: all processes that share codes call
        it together.
        """
        if self._floor is None:
            expected = self.logprobs()
            with self._model.context.other_roundings(OTHER_ROUNDINGS_SEED):
                rerounded = self.logprobs()
            self._floor = measure_mismatch(rerounded, expected, self.response_mask)
        return self._floor


def tolerance(model: LowBitModel, row_check: RowCheck | None) -> float:
    """Return the multiple of the floor by which learner and engine may differ.

    It is `SAME_KERNELS_TOLERANCE` or `OTHER_KERNELS_TOLERANCE`. row_check: self-test of the kernels
    that both multiply with; None if their kernels differ.
    """
    same_kernels = row_check is not None and not row_check.dependent
    # On GPUs the self-test does not cover the kernels of attention and sampling.
    on_cpu = model.device.type == "cpu"
    if same_kernels and on_cpu and model.operators == "engine":
        return SAME_KERNELS_TOLERANCE
    return OTHER_KERNELS_TOLERANCE


def describe_tolerance(multiple: float) -> str:
    """Return the words that explain a bound of this multiple of the floor."""
    return f"{multiple:g} times what two right implementations of this model are apart in rounding"
