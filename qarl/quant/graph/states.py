"""Values of the engine and gradients of a formula, for layers that keep a state of one size.

Gated delta nets, Mamba-2 layers and short convolutions keep a state instead of keys and values.
vLLM computes a prompt by one kernel and every later token by another, and the two round
differently. So each token is computed here as the engine computed it: together up to
`Sequences.prefilled`, one by one after that. The backward differentiates the layer's formula in
fp32, one sequence at a time.

Axes: N tokens of the row, S tokens that sequences see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qarl.configs.errors import GraphError
from qarl.quant.graph.packing import Sequences


class Rows(Protocol):
    """Function of the inputs of one or several sequences and of a layer's weights."""

    def __call__(self, rows: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
        """Return the layer's values, [S, …], of inputs [S, …] each."""
        ...


class EngineRows(Protocol):
    """Function of the inputs of several sequences, and of how the engine computed them."""

    def __call__(
        self,
        rows: Sequence[Tensor],
        weights: Sequence[Any],
        lengths: Sequence[int],
        prefilled: Sequence[int],
    ) -> Tensor:
        """Return the engine's values, compute dtype [S, …].

        Args:
            rows: inputs of all tokens, [S, …] each; sequences follow one another.
            weights: the layer's weights; None for one that it does not have.
            lengths: number of tokens of each sequence, Σ = S.
            prefilled: number of leading tokens of each sequence that are computed together.
        """
        ...


@dataclass(frozen=True)
class Recurrence:
    """The part of a layer that depends on earlier tokens."""

    kind: str
    """Name of the model's layers of this kind, in the plural, for messages."""
    values: EngineRows
    """The engine's values."""
    formula: Rows
    """The formula whose gradient is taken, of one sequence, in fp32."""

    def __call__(
        self, sequences: Sequences, rows: Sequence[Tensor], weights: Sequence[Any]
    ) -> Tensor:
        """Return the engine's values of the tokens of the row, compute dtype [N, …].

        Raises `GraphError` if it is unknown which tokens the engine prefilled.

        Args:
            sequences: the sequences of the row.
            rows: inputs, [N, …] each.
            weights: the layer's weights; None for one that it does not have.
        """
        if sequences.prefilled is None:
            raise GraphError(
                f"this model has {self.kind}, which compute a prompt with other roundings than"
                " sampled tokens, and it is unknown here which tokens are which, because these are"
                " conversations of several turns, or come without a mask of the tokens that were"
                " sampled; set learner.operators to 'transformers', whose log-probs agree up to"
                " rounding"
            )
        return _Core.apply(self, sequences, len(rows), *rows, *weights)

    def by_formula(
        self, sequences: Sequences, rows: Sequence[Tensor], weights: Sequence[Any]
    ) -> Tensor:
        """Return the formula's values of the tokens of the row, fp32 [N, …]. See `__call__`."""
        rows = [sequences.visible(t) for t in rows]
        weights = [None if weight is None else weight.float() for weight in weights]
        return torch.cat(
            [
                self.formula([t[seen] for t in rows], weights)[-length:]
                for seen, length in zip(slices(sequences.seen), sequences.lengths, strict=True)
            ]
        )


class _Core(torch.autograd.Function):
    """A `Recurrence` with its gradient. It saves its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        recurrence: Recurrence,
        sequences: Sequences,
        count: int,
        *tensors: Tensor | None,
    ) -> Tensor:
        """Return the engine's values, compute dtype [N, …].

        Args:
            recurrence: the layer's values and formula.
            sequences: the sequences of the row.
            count: number of inputs among the tensors.
            tensors: inputs, then weights.
        """
        ctx.recurrence = recurrence
        ctx.sequences = sequences
        ctx.count = count
        ctx.save_for_backward(*tensors)
        detached = [None if t is None else t.detach() for t in tensors]
        rows = [sequences.visible(t) for t in detached[:count] if t is not None]
        assert sequences.prefilled is not None
        output = recurrence.values(rows, detached[count:], sequences.seen, sequences.prefilled)
        own = [
            part[len(part) - length :]
            for part, length in zip(output.split(sequences.seen), sequences.lengths, strict=True)
        ]
        return torch.cat(own)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Differentiate the formula, one sequence at a time."""
        inputs = ctx.saved_tensors[: ctx.count]
        weights = ctx.saved_tensors[ctx.count :]
        sequences: Sequences = ctx.sequences
        inputs = [sequences.visible(t) for t in inputs]
        dinputs = [torch.zeros_like(t) for t in inputs]
        fp32_weights = [None if w is None else w.detach().float().requires_grad_() for w in weights]
        trained = [w for w in fp32_weights if w is not None]
        totals = [torch.zeros_like(w) for w in trained]
        gradients = grad_outputs[0].split(sequences.lengths)
        for seen, gradient in zip(slices(sequences.seen), gradients, strict=True):
            part = [t[seen].float().requires_grad_() for t in inputs]
            with torch.enable_grad():
                output = ctx.recurrence.formula(part, fp32_weights)[-len(gradient) :]
            parts = torch.autograd.grad(output, [*part, *trained], gradient.float())
            for rows, gradient_of_rows in zip(dinputs, parts[: ctx.count], strict=True):
                rows[seen] = gradient_of_rows.to(rows.dtype)
            for total, gradient_of_weight in zip(totals, parts[ctx.count :], strict=True):
                total += gradient_of_weight
        rest = iter(totals)
        returned = [None if w is None else next(rest).to(w.dtype) for w in weights]
        return None, None, None, *map(sequences.summed, dinputs), *returned


def slices(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield consecutive slices of these lengths."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def prompt_and_rest(lengths: Sequence[int], prefilled: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the positions of tokens that were computed together, and of all others, int64 each.

    lengths, prefilled: see `EngineRows`.
    """
    is_prompt = torch.cat(
        [torch.arange(n) < count for n, count in zip(lengths, prefilled, strict=True)]
    )
    return is_prompt.nonzero().flatten(), (~is_prompt).nonzero().flatten()
