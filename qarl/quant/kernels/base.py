"""Interface of every kernel family: protocols of a layer's kernel, and the error.

A kernel is a callable over one weight version of a layer. It holds the weight in the layout that it
multiplies, the kernel layout, and returns the product.

Axes: N tokens, O output rows, I input columns, H hidden columns, K experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qarl.configs.errors import QarlError
from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.experts import LowBitExperts


class KernelError(QarlError, heading="kernel"):
    """Raised if the requested kernel family cannot run here, or not for this scheme."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scoring of queries and keys in attention."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Number of tokens that a token sees, itself included; None for itself and all before it."""
    cap: float = 0.0
    """Soft cap: scores become cap · tanh(score / cap). 0 for none."""
    slopes: torch.Tensor | None = None
    """Number added to a score per token of distance (ALiBi), fp32 [heads]."""
    fp8: bool = False
    """Round keys and values to e4m3."""
    fp8_queries: bool = False
    """Round queries to e4m3 too."""

    @property
    def plain(self) -> bool:
        """Return whether scores are only scaled products, without a cap or slopes."""
        return self.cap == 0 and self.slopes is None


class LowBitMatmul(Protocol):
    """Kernel of one layer, or of several that are multiplied as one.

    It holds the weight in its own layout, and never changes the low-bit tensors.
    """

    @property
    def name(self) -> str:
        """Name of the kernel, as the audit has it."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x, compute dtype [N, I], and add the bias; returns compute dtype [N, O]."""
        ...


class ExpertsMatmul(Protocol):
    """Kernel of one layer's routed experts. It never changes the low-bit tensors."""

    @property
    def name(self) -> str:
        """Name of the kernel, as the audit has it."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, compute dtype [N, H].

        Args:
            x: inputs, compute dtype [N, H].
            weights: weight of each expert, fp32 [N, K].
            index: numbers of each token's experts, integer [N, K].
        """
        ...


class KernelFactory(Protocol):
    """Factory of the kernels of a model's layers, from their low-bit weights."""

    def linear(
        self,
        name: str,
        weights: Sequence[LowBitWeight],
        biases: Sequence[torch.Tensor | None],
        like: Any = None,
    ) -> LowBitMatmul:
        """Return the kernel of one layer, or of several layers that the engine multiplies as one.

        Args:
            name: checkpoint name of a single layer, the engine's name of several.
            weights: weight of each layer; the output's columns are their rows in this order.
            biases: bias of each layer, compute dtype [O], or None.
            like: the engine's module, if its dtype or forward differs from the factory's.
        """
        ...

    def experts(
        self,
        layer: str,
        shape: ExpertsShape,
        weights: LowBitExperts,
        biases: Sequence[torch.Tensor] = (),
    ) -> ExpertsMatmul:
        """Return the kernel of a layer's routed experts.

        Args:
            layer: the engine's name of the experts' module, without an expert's number.
            shape: numbers of experts and their sizes.
            weights: weights of the experts.
            biases: compute dtype [E, 2I] and [E, H] if `shape.biased`, else none.
        """
        ...
