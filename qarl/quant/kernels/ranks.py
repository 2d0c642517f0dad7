"""Products as the ranks of a tensor-parallel engine compute them.

A rank has some of the input columns of a row-parallel layer (`o_proj`, `down_proj`), and the
matching columns of its weight. It quantizes these columns of the input on their own, multiplies,
and rounds the product to the compute dtype; the first rank adds the bias. The engine then sums the
ranks' products: in fp32, rounded once (`sum_of_ranks`).

Of a column-parallel layer (q, k, v, gate, up) a rank has some of the output rows. A row's product
does not depend on the other rows, so that nothing has to be repeated here.

Axes: N tokens, O output rows, I input columns, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.base import ExpertsMatmul, KernelFactory, LowBitMatmul
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.experts import LowBitExperts


@dataclass(frozen=True)
class RowParallelMatmul:
    """Kernel of a row-parallel layer, or of several that are multiplied as one."""

    ranks: Sequence[LowBitMatmul]
    """Kernel of each rank's columns."""

    @property
    def name(self) -> str:
        """Name of the kernel that each rank multiplies by."""
        return self.ranks[0].name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x, compute dtype [N, I]; returns compute dtype [N, O]."""
        parts = x.split(x.shape[-1] // len(self.ranks), dim=-1)
        return sum_of_ranks(
            [rank(part.contiguous()) for rank, part in zip(self.ranks, parts, strict=True)]
        )


def sum_of_ranks(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' outputs, as the engine's all-reduce computes it.

    They are added from the first to the last in fp32, and rounded once.
    `quant.kernels.vllm_cpu.all_reduce` makes ranks on CPUs add so.
    """
    total = outputs[0].to(torch.float32)
    for output in outputs[1:]:
        total = total + output.to(torch.float32)
    return total.to(outputs[0].dtype)


def row_parallel(
    factory: KernelFactory,
    ranks: int,
    name: str,
    weights: Sequence[LowBitWeight],
    biases: Sequence[torch.Tensor | None],
    like: Any = None,
) -> LowBitMatmul:
    """Return the kernel of layers whose input columns are divided among `ranks` ranks.

    The other arguments are those of `KernelFactory.linear`.
    """
    if ranks == 1:
        return factory.linear(name, weights, biases, like)
    kernels = []
    for rank in range(ranks):
        own = [weight.columns(rank, ranks) for weight in weights]
        own_biases = biases if rank == 0 else [None] * len(biases)
        kernels.append(factory.linear(name, own, own_biases, like))
    return RowParallelMatmul(kernels)


@dataclass(frozen=True)
class RankExperts:
    """Routed experts of which each rank has some of the columns between their matrices."""

    ranks: Sequence[ExpertsMatmul]
    """Every rank's part of all experts."""

    @property
    def name(self) -> str:
        """Name of the kernel that each rank multiplies by."""
        return self.ranks[0].name

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see `ExpertsMatmul`."""
        return sum_of_ranks([rank(x, weights, index) for rank in self.ranks])


def experts_of_ranks(
    factory: KernelFactory,
    ranks: int,
    layer: str,
    shape: ExpertsShape,
    weights: LowBitExperts,
    biases: Sequence[torch.Tensor] = (),
) -> ExpertsMatmul:
    """Return the kernel of experts that are divided among `ranks` ranks.

    A rank weights and sums its parts of a token's experts, and rounds; then ranks are summed. The
    other arguments are those of `KernelFactory.experts`.
    """
    if ranks == 1:
        return factory.experts(layer, shape, weights, biases)
    assert not biases, "`kinds.undivided` refuses them"
    own = replace(shape, intermediate=shape.intermediate // ranks)
    return RankExperts(
        [factory.experts(layer, own, weights.of_rank(rank, ranks)) for rank in range(ranks)]
    )
