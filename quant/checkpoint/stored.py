"""Bytes of matrices and of the inputs a backward keeps, by a scheme's name alone and without torch: for plans that have
to answer at once. `quant.schemes` decides what a scheme is; tests/quant/test_materialize.py holds this table to the
tensors that are stored.

Axes: O output rows, I input columns.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """How a scheme's matrix is kept. bits: of a code as it is stored; None: of the compute dtype. rows, columns: that
    share a scale, columns None for a whole row. scale: bytes of one; None: of the compute dtype. besides: bytes a
    matrix has beside both. input_bits: of a value of its input between forward and backward, scales left out; None: of
    the compute dtype."""

    bits: int | None = None
    rows: int = 1
    columns: int | None = None
    scale: int | None = None
    besides: int = 0
    input_bits: int | None = None

    def weight(self, shape: tuple[int, int], itemsize: int) -> int:
        """Bytes of a matrix of `shape` (O, I). itemsize: of the compute dtype."""
        rows, columns = shape
        if self.bits is None:
            return rows * columns * itemsize
        scales = (rows // self.rows) * (columns // (self.columns or columns))
        return rows * columns * self.bits // 8 + scales * (self.scale or itemsize) + self.besides

    def input(self, itemsize: int) -> float:
        """Bytes of one value of an input, kept for the backward."""
        return itemsize if self.input_bits is None else self.input_bits / 8


_SHAPE, _GLOBAL = 16, 4
"""Bytes of `weight_shape`, and of an NVFP4 global scale."""

STORED = {
    "bf16": Stored(),
    "w4a16": Stored(4, columns=128, besides=_SHAPE),
    "w4a16-g64": Stored(4, columns=64, besides=_SHAPE),
    "w4a16-g32": Stored(4, columns=32, besides=_SHAPE),
    "w4a16-channel": Stored(4, besides=_SHAPE),
    "w8a16": Stored(8, columns=128, besides=_SHAPE),
    "w8a8": Stored(8, input_bits=8),
    "w4a8": Stored(8, columns=128, input_bits=8),
    "w4afp8": Stored(4, columns=128, besides=_SHAPE, input_bits=8),
    "fp8": Stored(8, input_bits=8),
    "fp8-block": Stored(8, rows=128, columns=128, input_bits=8),
    "nvfp4a16": Stored(4, columns=16, scale=1, besides=_GLOBAL),
    "nvfp4": Stored(4, columns=16, scale=1, besides=2 * _GLOBAL, input_bits=4),
    "mxfp4a16": Stored(4, columns=32, scale=1),
}
