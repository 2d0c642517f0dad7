"""Named quantization schemes: what `configs.schemes` says of each, with its rounding ranges and
ignored layers.

A scheme wraps a `compressed_tensors.QuantizationScheme`. Materialization, the learner's products,
the published stream and the `quantization_config` vLLM reads are all derived from that one object.

Axes: O output rows, I input columns, Q quantization groups.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    DynamicType,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
    QuantizationType,
)

from qarl.configs.errors import SchemeError
from qarl.configs.schemes import SCHEME_SPECS, Codes, SchemeSpec, check_scheme_name

COMPUTE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
MASTER_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_PROTECTED = re.compile(
    r"lm_head|.*embed_tokens|.*\.(gate(\.wg)?|router(\.\w+)?|shared_expert_gate)"
)
"""Layers every scheme leaves in the compute dtype: embeddings, output head, expert routers."""

FP8_MAX = float(torch.finfo(torch.float8_e4m3fn).max)
FP4_MAX = 6.0

INPUT_GLOBAL_SCALE = 1.0
"""NVFP4 stores activations as code · e4m3 scale / input_global_scale, and expects that factor from
a calibration.

In reinforcement learning nothing is calibrated: a factor measured on the first policy would clip
the later one's outliers, and one that is measured again and again would make a weight version
depend on the data it last saw. So it is 1, what compressed-tensors gives layers no calibration
token reached. Groups of 16 activations with a maximum from 0.09 to 2688 then have a scale of full
e4m3 precision, smaller ones a coarser one, and below 0.006 they become zero. Learner and engine do
the same, so training sees, and learns around, what that costs.
"""

_MEANING = attrgetter(
    "num_bits",
    "type",
    "strategy",
    "group_size",
    "block_structure",
    "symmetric",
    "dynamic",
)
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


@dataclass(frozen=True)
class Scheme:
    """How weights and activations of a model's linear layers are represented.

    name, format: as in `configs.schemes.SchemeSpec`. quantization, format: None for the unquantized
    `bf16` scheme.
    """

    name: str
    quantization: QuantizationScheme | None
    format: CompressionFormat | None = None

    @property
    def weights(self) -> QuantizationArgs | None:
        """Weight arguments (bits, strategy, group size), None when unquantized."""
        return self.quantization.weights if self.quantization else None

    @property
    def activations(self) -> QuantizationArgs | None:
        """Dynamic input-activation arguments, None when activations stay in the compute dtype."""
        return self.quantization.input_activations if self.quantization else None

    @property
    def group_size(self) -> int | None:
        """Input columns that share one scale; None when a whole row does (or nothing is
        quantized).
        """
        args = self.weights
        return (
            self.block[1]
            if self.block
            else args.group_size
            if args and args.strategy in _GROUPED
            else None
        )

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) that share one scale, where scales go by blocks of both; else None."""
        args = self.weights
        if (
            args is None
            or args.strategy != QuantizationStrategy.BLOCK
            or args.block_structure is None
        ):
            return None
        return args.block_structure[0], args.block_structure[1]

    @property
    def packs_integers(self) -> bool:
        """Whether integer codes are stored several to an int32."""
        return self.format == CompressionFormat.pack_quantized

    @property
    def input_global_scale(self) -> float | None:
        """The fp32 factor above NVFP4 activation scales, the same for every layer; None for other
        activations.
        """
        args = self.activations
        return (
            INPUT_GLOBAL_SCALE
            if args and args.strategy == QuantizationStrategy.TENSOR_GROUP
            else None
        )

    @property
    def fuses_scales(self) -> bool:
        """Whether a tensor-wide weight scale must agree over layers the engine multiplies together
        (q, k and v).
        """
        args = self.weights
        return args is not None and args.strategy == QuantizationStrategy.TENSOR_GROUP

    def leaves_alone(self, layer: str) -> bool:
        """Whether the linear layer of this checkpoint name stays in the compute dtype."""
        return self.quantization is None or is_protected(layer)

    def check_layer(self, layer: str, shape: tuple[int, int]) -> None:
        """Raise `SchemeError` if a weight of `shape` (O, I) cannot be stored in this scheme."""
        spec, (rows, columns) = SCHEME_SPECS[self.name], shape
        codes = spec.weights
        if codes is None or spec.fits(shape):
            return
        has = (
            f"{columns} input columns, no multiple of the {32 // codes.bits} codes that are packed"
            " to an int32"
        )
        if rows % codes.rows:
            has = f"{rows} output rows, no multiple of the block's {codes.rows}"
        if codes.columns and columns % codes.columns:
            has = f"{columns} input columns, no multiple of the group size {codes.columns}"
        fitting = ", ".join(name for name, other in SCHEME_SPECS.items() if other.fits(shape))
        raise SchemeError(
            f"scheme {self.name!r}: layer {layer!r} has {has}; choose one that fits it ({fitting})"
            " or another model"
        )


def write_quantization_config(
    groups: Sequence[tuple[Scheme, Sequence[str]]],
    ignore: Sequence[str],
    kv_cache: str | None = None,
) -> dict[str, Any] | None:
    """The `quantization_config` for config.json; None without groups. groups: quantized schemes and
    the targets of each, module classes or layer names as readers match them. ignore: layers in the
    compute dtype. kv_cache: "fp8", or None.
    """
    written, formats = {}, []
    for scheme, targets in groups:
        assert scheme.quantization is not None
        assert scheme.format is not None
        changes = {"format": scheme.format, "targets": list(targets)}
        written[f"group_{len(written)}"] = scheme.quantization.model_copy(update=changes)
        formats.append(scheme.format)
    if not written and kv_cache is not None:
        raise SchemeError(
            f"quantization.kv_cache {kv_cache!r} of a model without a low-bit layer, whose"
            " config.json has no place to say so; quantize one, or leave it out"
        )
    if not written:
        return None
    cache = QuantizationArgs(num_bits=8, type=QuantizationType.FLOAT, dynamic=False)
    config = QuantizationConfig(
        config_groups=written,
        format=(formats[0] if len(set(formats)) == 1 else CompressionFormat.mixed_precision).value,
        ignore=list(ignore),
        quantization_status=QuantizationStatus.COMPRESSED,
        kv_cache_scheme=None if kv_cache is None else cache,
    )
    return config.model_dump(mode="json")


def is_protected(layer: str) -> bool:
    """Whether a layer is an embedding, an output head or a router by its name."""
    return _PROTECTED.fullmatch(layer) is not None


def _scheme(spec: SchemeSpec) -> Scheme:
    """A line of the table in compressed-tensors' words."""
    if spec.weights is None:
        return Scheme(spec.name, None)
    activations = None if spec.activations is None else _arguments(spec.activations, dynamic=True)
    return Scheme(
        name=spec.name,
        quantization=QuantizationScheme(
            targets=["Linear"],
            weights=_arguments(spec.weights, dynamic=False),
            input_activations=activations,
        ),
        format=CompressionFormat(spec.format),
    )


def _arguments(codes: Codes, dynamic: bool) -> QuantizationArgs:
    """dynamic: of an activation, whose scales are made as it comes."""
    arguments: dict[str, Any] = {
        "num_bits": codes.bits,
        "type": codes.kind,
        "symmetric": codes.symmetric,
    }
    if codes.rows > 1:
        arguments |= {
            "strategy": "block",
            "block_structure": [codes.rows, codes.columns],
        }
    elif codes.columns is None:
        arguments |= {"strategy": "token" if dynamic else "channel"}
    else:
        arguments |= {"strategy": "group", "group_size": codes.columns}
    if codes.scale == "power":
        arguments |= {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    elif codes.scale == "e4m3":
        arguments |= {"strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
        if dynamic:  # but for the scale over all of a tensor, which a checkpoint brings
            return QuantizationArgs(
                **arguments, dynamic=DynamicType.LOCAL, observer="static_minmax"
            )
    return QuantizationArgs(**arguments, dynamic=dynamic)


SCHEMES: dict[str, Scheme] = {name: _scheme(spec) for name, spec in SCHEME_SPECS.items()}


def get_scheme(name: str) -> Scheme:
    """The scheme of that name. Raises `SchemeError` quoting the name, the known ones and the
    nearest.
    """
    check_scheme_name(name)
    return SCHEMES[name]


def scheme_of_args(
    weights: QuantizationArgs | None, activations: QuantizationArgs | None
) -> Scheme | None:
    """The named scheme with these arguments, as an engine parsed them from a checkpoint; None if
    none is known.
    """

    def meaning(args: QuantizationArgs | None) -> tuple[Any, ...] | None:
        return args and _MEANING(args)

    wanted = meaning(weights), meaning(activations)
    return next(
        (s for s in SCHEMES.values() if (meaning(s.weights), meaning(s.activations)) == wanted),
        None,
    )


def is_integer(args: QuantizationArgs) -> bool:
    """Whether codes are integers, else floating-point."""
    return args.type == QuantizationType.INT


def describe_weights(scheme: Scheme) -> str:
    """A scheme's weights in words, e.g. "int4, group 128"."""
    args = scheme.weights
    if args is None:
        return "compute dtype"
    if scheme.block:
        return f"{_type(args)}, block {scheme.block[0]}×{scheme.block[1]}"
    return (
        f"{_type(args)}, group {scheme.group_size}"
        if scheme.group_size
        else f"{_type(args)}, per channel"
    )


def describe_activations(scheme: Scheme) -> str:
    """A scheme's activations in words, e.g. "int8, dynamic per token"."""
    args = scheme.activations
    if args is None:
        return "compute dtype"
    span = f"token group {args.group_size}" if args.strategy in _GROUPED else "token"
    return f"{_type(args)}{'' if args.symmetric else ' asymmetric'}, dynamic per {span}"


def _type(args: QuantizationArgs) -> str:
    if is_integer(args):
        return f"int{args.num_bits}"
    if args.num_bits == 8:
        return "fp8 e4m3"
    return "nvfp4" if args.strategy == QuantizationStrategy.TENSOR_GROUP else "mxfp4"
