"""Random tensors, and comparisons of two tensors."""

from collections.abc import Iterable

import torch

from qarl.quant.digest import StreamDigest
from qarl.quant.types import LowBitTensor


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def heavy(*shape: int, seed: int, rows: bool = True) -> torch.Tensor:
    """Return log-normal times normal numbers, with rows of different magnitudes unless `rows` is
    false. Such tensors make quantization errors visible.
    """
    scales = normal(*shape, seed=seed + 1).exp()
    drawn = normal(*shape, seed=seed) * scales
    if not rows:
        return drawn
    row_scales = normal(shape[0], 1, seed=seed + 2).exp()
    return drawn * row_scales


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as uint8 with a longer last dimension.

    Equal bytes are equal bits, including NaN and signs of zero.
    """
    return torch.atleast_1d(tensor.contiguous()).view(torch.uint8)


def same_bits(
    ours: Iterable[tuple[str, torch.Tensor]], theirs: Iterable[tuple[str, torch.Tensor]]
) -> bool:
    """Return whether both have the same names in the same order with equal
    dtypes, shapes and bits.
    """
    return all(
        a == b
        and x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(as_bytes(x), as_bytes(y))
        for (a, x), (b, y) in zip(ours, theirs, strict=True)
    )


def pairwise_equal(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors at the same place are equal, as many on both sides."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def relative_error(given: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ‖given - exact‖ / ‖exact‖ by Frobenius norms in float64."""
    given = given.detach().double()
    exact = exact.detach().double()
    return float((given - exact).norm() / exact.norm())


def stream_digest(items: Iterable[LowBitTensor]) -> str:
    """Return the digest that a sender states for a stream."""
    digest = StreamDigest()
    for item in items:
        digest.update(item)
    return digest.hexdigest()
