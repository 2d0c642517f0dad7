"""How far two right implementations of a model are apart: what bounds on learner against engine are
measured from.

Two implementations that multiply the same codes in the same dtype still add up in other orders, and
round otherwise. How far that carries depends on the model: a narrow one of two layers parts by a
thousandth of a nat a token, SmolLM2-135M by 0.05 in bfloat16 and by 0.2 with int8 activations,
whose codes flip. So a run asks its own model: the same sequences are scored twice, once with every
product's results moved at random by up to one unit in their last place.

Measured of SmolLM2-135M in w8a8: the two forms are 0.24 nats a token apart, and a learner with
transformers' operators, which is right, is 0.23 from the engine. Rows of one layer's values
permuted: 3.5.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.quant.layers.context import Forward
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.row_check import RowCheck

ROUNDED = 2.0
"""Times the floor that a right implementation of other operators or kernels may be apart."""
EXACT = 0.1
"""The same where learner and engine have the same kernels, each of which computes a row alike
beside any others. Equality is expected then. A fault as small as one step's update moves log-probs
by as much as other roundings do, so that a tenth of the floor tells it, and leaves room for what
nobody tried.
"""
OTHER_ROUNDINGS_SEED = 65


class FixedSequences:
    """Fixed sequences, scored by the published codes with layers of the learner's own.

    sequences: token ids, at least two each. tokens: int64 [B, T], padded on the right.
    response_mask: bool [B, T-1].
    """

    def __init__(self, model: LowBitModel, sequences: Sequence[Sequence[int]]):
        self._model = model
        self.tokens = pad_sequence(
            [torch.tensor(sequence) for sequence in sequences], batch_first=True
        )
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        self.response_mask = torch.arange(1, self.tokens.shape[1])[None] < lengths[:, None]
        self._floor: Mismatch | None = None

    @torch.no_grad()
    def logprobs(self) -> torch.Tensor:
        """Return log-probs of every token but each sequence's first, fp32 [B, T-1], on the CPU."""
        model, device = self._model, self._model.device
        tokens, mask = self.tokens.to(device), self.response_mask.to(device)
        with model.forward_as(Forward.PUBLISHED), model.context.own_products():
            logprobs, _ = token_logprobs(model, tokens, mask, entropy=False)
        return logprobs.cpu()

    def floor(self) -> Mismatch:
        """Return how far two right forms are apart on these sequences, measured by two forwards at
        the first call.

        All processes that share codes come here together.
        """
        if self._floor is None:
            expected = self.logprobs()
            with self._model.context.other_roundings(OTHER_ROUNDINGS_SEED):
                moved = self.logprobs()
            self._floor = measure_mismatch(moved, expected, self.response_mask)
        return self._floor


def tolerance(model: LowBitModel, rows: RowCheck | None) -> float:
    """Return how many times the floor learner and engine may be apart: `EXACT` or `ROUNDED`.

    rows: the self-test of the kernels that both multiply with; None where the learner has others
    than the engine.
    """
    same_kernels = rows is not None and not rows.dependent
    # on GPUs attention and sampling have kernels that the self-test does not ask
    on_cpu = model.device.type == "cpu"
    return EXACT if same_kernels and on_cpu and model.operators == "engine" else ROUNDED


def describe_tolerance(times: float) -> str:
    """Return the words in which a bound of so many times the floor is explained."""
    return f"{times:g} times what two right implementations of this model are apart in rounding"
