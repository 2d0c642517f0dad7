"""Random tensors, and how two tensors are compared."""

from collections.abc import Iterable

import torch

from qarl.quant.digest import StreamDigest
from qarl.quant.types import LowBitTensor


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int, seed: int, rows: bool = True) -> torch.Tensor:
    """Log-normal times normal, and rows of different magnitudes unless told: what makes
    quantization visible.
    """
    drawn = normal(*shape, seed=seed) * normal(*shape, seed=seed + 1).exp()
    return drawn * normal(shape[0], 1, seed=seed + 2).exp() if rows else drawn


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, the last dimension as many times longer: equal bytes are equal bits, NaN and signs of
    zero included.
    """
    return torch.atleast_1d(tensor.contiguous()).view(torch.uint8)


def same_bits(
    ours: Iterable[tuple[str, torch.Tensor]], theirs: Iterable[tuple[str, torch.Tensor]]
) -> bool:
    """Whether the same names stand in the same order, each with one dtype, shape and bits."""
    return all(
        a == b
        and x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(as_bytes(x), as_bytes(y))
        for (a, x), (b, y) in zip(ours, theirs, strict=True)
    )


def relative_error(given: torch.Tensor, exact: torch.Tensor) -> float:
    """‖given - exact‖ / ‖exact‖, Frobenius norms in float64."""
    given = given.detach().double()
    exact = exact.detach().double()
    return float((given - exact).norm() / exact.norm())


def stream_digest(items: Iterable[LowBitTensor]) -> str:
    """What a sender says of a stream."""
    digest = StreamDigest()
    for item in items:
        digest.update(item)
    return digest.hexdigest()
