"""What every kernel family provides: protocols of a layer's prepared product, and the error where
one cannot run.

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
    """The requested kernel family cannot run here, or not for this scheme."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How queries and keys are scored. scale: of their products. window: how many tokens each sees,
    itself the last; None: all before it. cap: scores are cap · tanh(score / cap); 0: they are not.
    slopes: fp32 [H], added a token of distance (ALiBi), or None. fp8: keys and values are rounded
    to e4m3; fp8_queries: queries, too.
    """

    scale: float
    window: int | None = None
    cap: float = 0.0
    slopes: torch.Tensor | None = None
    fp8: bool = False
    fp8_queries: bool = False

    @property
    def plain(self) -> bool:
        """Whether scores are scaled products alone."""
        return self.cap == 0 and self.slopes is None


class LowBitMatmul(Protocol):
    """One layer's prepared product. Holds whatever layout its kernel needs; never changes the
    low-bit tensors.
    """

    @property
    def name(self) -> str:
        """Which kernel multiplies."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O], bias included."""
        ...


class ExpertsMatmul(Protocol):
    """One layer's routed experts, prepared. Never changes the low-bit tensors."""

    @property
    def name(self) -> str:
        """Which kernel multiplies."""
        ...

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, H]; weights: fp32 [N, K]; index: integer [N, K], experts → compute
        dtype [N, H].
        """
        ...


class KernelFactory(Protocol):
    """Makes the products of a model's layers from their low-bit weights."""

    def linear(
        self,
        name: str,
        weights: Sequence[LowBitWeight],
        biases: Sequence[torch.Tensor | None],
        like: Any = None,
    ) -> LowBitMatmul:
        """One product of what the engine multiplies as one: of a layer, or of several with their
        rows one after the other. name: the checkpoint's of a layer, the engine's of several.
        weights: of each. biases: of each, compute dtype [O] or None. like: the engine's module,
        where it has a dtype or a forward of its own.
        """
        ...

    def experts(self, layer: str, shape: ExpertsShape, weights: LowBitExperts) -> ExpertsMatmul:
        """layer: checkpoint name of the experts' module, without the number of one."""
        ...
