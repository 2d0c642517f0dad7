"""The schemes, a line each: bits, which values share a scale, how codes are stored. The one place
that says so.

Imports nothing heavy, so that a name is checked and a plan counts bytes before torch is imported;
`quant.schemes` makes of each line what is quantized by.

Axes: O output rows, I input columns.
"""

from dataclasses import dataclass
from typing import Literal

from qarl.configs.errors import SchemeError
from qarl.configs.words import did_you_mean

UNQUANTIZED = "bf16"
"""The scheme that leaves all layers in the compute dtype."""
_SHAPE, _GLOBAL = 16, 4
"""Bytes of a packed matrix's `weight_shape`, and of an NVFP4 global scale."""


@dataclass(frozen=True)
class Codes:
    """What stands for the values of a weight or an activation.

    kind, bits: "int", or "float": e4m3 in 8 bits, e2m1 in 4. columns: that share a scale; None: a
    whole row, of an activation a token's. rows: that share it with them. scale: in the compute
    dtype ("compute"), in e4m3 under one fp32 scale a tensor ("e4m3", NVFP4), or a power of two
    ("power", MXFP4). symmetric: without a zero point.
    """

    kind: Literal["int", "float"]
    bits: int
    columns: int | None = None
    rows: int = 1
    scale: Literal["compute", "e4m3", "power"] = "compute"
    symmetric: bool = True


@dataclass(frozen=True)
class SchemeSpec:
    """One scheme. weights, activations: None where they stay in the compute dtype. format: of codes
    in a checkpoint, by compressed-tensors' name.
    """

    name: str
    weights: Codes | None = None
    activations: Codes | None = None
    format: str = "pack-quantized"

    def weight_bytes(self, shape: tuple[int, int], itemsize: int) -> int:
        """Bytes of a stored matrix of `shape` (O, I) with its scales. itemsize: of the compute
        dtype.
        """
        (rows, columns), codes = shape, self.weights
        if codes is None:
            return rows * columns * itemsize
        bits = 8 if self.format == "int-quantized" else codes.bits
        scales = (rows // codes.rows) * (columns // (codes.columns or columns))
        besides = _SHAPE if self.format == "pack-quantized" else 0
        if codes.scale == "e4m3":
            besides = _GLOBAL if self.activations is None else 2 * _GLOBAL
        return (
            rows * columns * bits // 8
            + scales * (itemsize if codes.scale == "compute" else 1)
            + besides
        )

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether a matrix of `shape` (O, I) comes to whole groups, blocks and int32s of codes."""
        (rows, columns), codes = shape, self.weights
        if codes is None:
            return True
        packed = 32 // codes.bits if self.format == "pack-quantized" else 1
        return not (columns % (codes.columns or 1) or columns % packed or rows % codes.rows)

    def input_bytes(self, itemsize: int) -> float:
        """Bytes of one value of an input between forward and backward, its scale left out."""
        return itemsize if self.activations is None else self.activations.bits / 8


_INT4, _INT8, _FP8 = Codes("int", 4, columns=128), Codes("int", 8), Codes("float", 8)
_FP8_BLOCK, _FP8_GROUP = (
    Codes("float", 8, columns=128, rows=128),
    Codes("float", 8, columns=128),
)
_NVFP4 = Codes("float", 4, columns=16, scale="e4m3")

# Formats are those compressed-tensors infers for a scheme, but for w4afp8, which vLLM reads packed
# only.
SCHEME_SPECS: dict[str, SchemeSpec] = {
    spec.name: spec
    for spec in (
        SchemeSpec("bf16"),
        SchemeSpec("w4a16", _INT4),
        SchemeSpec("w4a16-g64", Codes("int", 4, columns=64)),
        SchemeSpec("w4a16-g32", Codes("int", 4, columns=32)),
        SchemeSpec("w4a16-channel", Codes("int", 4)),
        SchemeSpec("w8a16", Codes("int", 8, columns=128)),
        SchemeSpec("w8a8", _INT8, _INT8, "int-quantized"),
        # What vLLM's kernel computes whatever a checkpoint says: activations with a zero point.
        SchemeSpec("w4a8", _INT4, Codes("int", 8, symmetric=False), "int-quantized"),
        SchemeSpec("w4afp8", _INT4, _FP8),
        SchemeSpec("fp8", _FP8, _FP8, "float-quantized"),
        SchemeSpec("fp8-block", _FP8_BLOCK, _FP8_GROUP, "float-quantized"),
        SchemeSpec("nvfp4a16", _NVFP4, None, "nvfp4-pack-quantized"),
        SchemeSpec("nvfp4", _NVFP4, _NVFP4, "nvfp4-pack-quantized"),
        SchemeSpec(
            "mxfp4a16",
            Codes("float", 4, columns=32, scale="power"),
            None,
            "mxfp4-pack-quantized",
        ),
    )
}
SCHEME_NAMES = tuple(SCHEME_SPECS)


def check_scheme_name(name: str) -> None:
    """Raise `SchemeError` quoting an unknown name, the known ones and the nearest."""
    if name not in SCHEME_NAMES:
        raise SchemeError(
            f"unknown scheme {name!r}: known are {', '.join(map(repr, SCHEME_NAMES))}"
            f"{did_you_mean(name.lower(), SCHEME_NAMES)}"
        )
