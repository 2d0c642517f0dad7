"""Table of the schemes, one a line: bits, which values share a scale, and how codes are stored.

This is the only place that defines them; `quant.schemes` builds the quantizers from it. It imports
nothing heavy, so that names are checked and a plan counts bytes before torch is imported.

Axes: O output rows, I input columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qarl.configs.errors import SchemeError
from qarl.configs.words import did_you_mean

UNQUANTIZED = "bf16"
"""The scheme that leaves all layers in the compute dtype."""
_SHAPE = 16
"""Bytes of a packed matrix's `weight_shape`."""
_GLOBAL = 4
"""Bytes of an NVFP4 global scale."""


@dataclass(frozen=True)
class Codes:
    """Codes for the values of a weight or an activation."""

    kind: Literal["int", "float"]
    """Number format; a float is e4m3 in 8 bits and e2m1 in 4."""
    bits: int
    """Bits per code."""
    columns: int | None = None
    """Columns that share a scale; None for a whole row, which in an activation is a token's."""
    rows: int = 1
    """Rows that share a scale."""
    scale: Literal["compute", "e4m3", "power"] = "compute"
    """Format of scales: the compute dtype, e4m3 under one fp32 scale per tensor (NVFP4), or a power
    of two (MXFP4).
    """
    symmetric: bool = True
    """True if there is no zero point."""


@dataclass(frozen=True)
class SchemeSpec:
    """One scheme."""

    name: str
    """Name by which a configuration chooses the scheme."""
    weights: Codes | None = None
    """Codes of weights; None if they stay in the compute dtype."""
    activations: Codes | None = None
    """Codes of activations; None if they stay in the compute dtype."""
    format: str = "pack-quantized"
    """Format of the codes in a checkpoint, by its name in compressed-tensors."""
    only: str = ""
    """Machines that vLLM has the scheme for, if not for all CPUs and GPUs."""

    def weight_bytes(self, shape: tuple[int, int], itemsize: int) -> int:
        """Return the bytes of a stored matrix of `shape` (O, I) with its scales.

        itemsize: bytes of a value in the compute dtype.
        """
        rows, columns = shape
        codes = self.weights
        if codes is None:
            return rows * columns * itemsize
        bits = 8 if self.format == "int-quantized" else codes.bits
        scales = (rows // codes.rows) * (columns // (codes.columns or columns))
        scale_bytes = itemsize if codes.scale == "compute" else 1
        extra = _SHAPE if self.format == "pack-quantized" else 0
        if codes.scale == "e4m3":
            extra = _GLOBAL if self.activations is None else 2 * _GLOBAL
        return rows * columns * bits // 8 + scales * scale_bytes + extra

    def misfit(self, shape: tuple[int, int]) -> str:
        """Return why a matrix of `shape` (O, I) cannot be stored; "" if it can.

        It has to divide into groups, blocks and int32s of codes.
        """
        rows, columns = shape
        codes = self.weights
        if codes is None:
            return ""
        if codes.columns and columns % codes.columns:
            return f"{columns} input columns, no multiple of the group size {codes.columns}"
        if rows % codes.rows:
            return f"{rows} output rows, no multiple of the block's {codes.rows}"
        packed = 32 // codes.bits
        if self.format == "pack-quantized" and columns % packed:
            return (
                f"{columns} input columns, no multiple of the {packed} codes that are packed to an"
                " int32"
            )
        return ""

    def fits(self, shape: tuple[int, int]) -> bool:
        """Return whether a matrix of `shape` (O, I) can be stored."""
        return not self.misfit(shape)

    def check_layer(self, layer: str, shape: tuple[int, int]) -> None:
        """Raise `SchemeError` if a layer's weight of `shape` (O, I) cannot be stored."""
        misfit = self.misfit(shape)
        if misfit:
            fitting = ", ".join(name for name, other in SCHEME_SPECS.items() if other.fits(shape))
            raise SchemeError(
                f"scheme {self.name!r}: layer {layer!r} has {misfit}; choose one that fits it"
                f" ({fitting}) or another model"
            )

    def fp32_on_cpus(self, avx512: bool) -> bool:
        """Return whether CPUs multiply weights that are held in fp32 (`quant.kernels.vllm_cpu`).

        Those of fp8, on every CPU; without AVX-512 also those of int4 alone, and of int8 by int8.
        """
        codes = self.weights
        if codes is None or self.only:
            return False
        integers = not avx512 and self.activations in (None, codes)
        return codes.kind == "float" or integers

    def input_bytes(self, itemsize: int) -> float:
        """Return the bytes of one input value between forward and backward, without its scale."""
        return itemsize if self.activations is None else self.activations.bits / 8


_INT4 = Codes("int", 4, columns=128)
_INT8 = Codes("int", 8)
_FP8 = Codes("float", 8)
_FP8_BLOCK = Codes("float", 8, columns=128, rows=128)
_FP8_GROUP = Codes("float", 8, columns=128)
_NVFP4 = Codes("float", 4, columns=16, scale="e4m3")

# Formats are those that compressed-tensors infers for a scheme, except for w4afp8, which vLLM reads
# only packed.
SCHEME_SPECS: dict[str, SchemeSpec] = {
    spec.name: spec
    for spec in (
        SchemeSpec("bf16"),
        SchemeSpec("w4a16", _INT4),
        SchemeSpec("w4a16-g64", Codes("int", 4, columns=64)),
        SchemeSpec("w4a16-g32", Codes("int", 4, columns=32)),
        SchemeSpec("w4a16-channel", Codes("int", 4)),
        SchemeSpec("w8a16", Codes("int", 8, columns=128), only="GPUs"),
        SchemeSpec("w8a8", _INT8, _INT8, "int-quantized"),
        # vLLM's kernel uses a zero point for activations, whatever the checkpoint says.
        SchemeSpec("w4a8", _INT4, Codes("int", 8, symmetric=False), "int-quantized", only="CPUs"),
        SchemeSpec("w4afp8", _INT4, _FP8, only="GPUs of compute capability 9.0"),
        SchemeSpec("fp8", _FP8, _FP8, "float-quantized"),
        SchemeSpec("fp8-block", _FP8_BLOCK, _FP8_GROUP, "float-quantized", only="GPUs"),
        SchemeSpec("nvfp4a16", _NVFP4, None, "nvfp4-pack-quantized", only="NVIDIA GPUs"),
        SchemeSpec("nvfp4", _NVFP4, _NVFP4, "nvfp4-pack-quantized", only="NVIDIA GPUs"),
        SchemeSpec(
            "mxfp4a16",
            Codes("float", 4, columns=32, scale="power"),
            None,
            "mxfp4-pack-quantized",
            only="GPUs",
        ),
    )
}
SCHEME_NAMES = tuple(SCHEME_SPECS)


def check_shapes(layers: Iterable[tuple[str, str, tuple[int, int]]]) -> None:
    """Raise `SchemeError` if a matrix cannot be stored in its scheme, with the first of them and
    the number of the others.

    layers: layer's name, scheme's name, and (O, I) of each matrix.
    """
    problems = []
    for layer, scheme, shape in layers:
        try:
            SCHEME_SPECS[scheme].check_layer(layer, shape)
        except SchemeError as error:
            problems.append(str(error))
    if problems:
        more = f" (and {len(problems) - 1} more layers)" if len(problems) > 1 else ""
        raise SchemeError(problems[0] + more)


def known_scheme(name: str) -> str:
    """Return a scheme's name. Raise `SchemeError`, with the known names and the nearest, if it is
    unknown.

    A configuration is checked by this when it is made, so that its names are known from then on.
    """
    if name not in SCHEME_NAMES:
        raise SchemeError(
            f"unknown scheme {name!r}: known are {', '.join(map(repr, SCHEME_NAMES))}"
            f"{did_you_mean(name.lower(), SCHEME_NAMES)}"
        )
    return name
