"""Named quantization schemes, built from the table in `configs.schemes`.

A scheme wraps a `compressed_tensors.QuantizationScheme`. Materialization, the learner's products,
the published stream and the `quantization_config` vLLM reads are all derived from that one object.
This module also has the code ranges and the layers that every scheme leaves unquantized.

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
from qarl.configs.schemes import SCHEME_SPECS, Codes, SchemeSpec, known_scheme

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
    r"(.*\.)?lm_head|.*embed_tokens"
    r"|.*\.(gate(\.wg)?|router(\.\w+)?|shared_expert_gate|in_proj_(ba|b|a))"
)
"""Names of layers that every scheme leaves in the compute dtype: embeddings, output head, expert
routers, and the products that give strength and decay of gated delta nets.
"""

FP8_MAX = float(torch.finfo(torch.float8_e4m3fn).max)
"""Largest e4m3 value, 448."""
FP4_MAX = 6.0
"""Largest e2m1 value."""

INPUT_GLOBAL_SCALE = 1.0
"""Factor in NVFP4 activations, which are stored as code · e4m3 scale / input_global_scale.

NVFP4 expects this factor from a calibration. In reinforcement learning nothing is calibrated. A
factor measured on the first policy would clip the outliers of later ones, and a factor measured
again and again would make a weight version depend on the data it last saw. So it is 1, which is
what compressed-tensors gives a layer that no calibration token reached.

A group of 16 activations whose maximum lies between 0.09 and 2688 then has a scale of full e4m3
precision. Groups with a smaller maximum have a coarser scale, and below 0.006 they become zero.
Learner and engine do the same, so training sees this cost and learns around it.
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
"""Fields of `QuantizationArgs` that decide what is computed, as a tuple."""
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


@dataclass(frozen=True)
class Scheme:
    """Representation of the weights and activations of a model's linear layers."""

    name: str
    """Name in `configs.schemes.SCHEME_SPECS`."""
    quantization: QuantizationScheme | None
    """Arguments of weights and activations; None for the unquantized `bf16` scheme."""
    format: CompressionFormat | None = None
    """Storage format, as in `configs.schemes.SchemeSpec`; None for the unquantized scheme."""

    @property
    def weights(self) -> QuantizationArgs | None:
        """Weight arguments (bits, strategy, group size); None if weights are unquantized."""
        return self.quantization.weights if self.quantization else None

    @property
    def activations(self) -> QuantizationArgs | None:
        """Dynamic input-activation arguments; None if activations stay in the compute dtype."""
        return self.quantization.input_activations if self.quantization else None

    @property
    def group_size(self) -> int | None:
        """Input columns that share a scale; None if a full row does, or if nothing is quantized."""
        if self.block:
            return self.block[1]
        args = self.weights
        return args.group_size if args and args.strategy in _GROUPED else None

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) of the blocks that share a scale; None for schemes without blocks."""
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
        """Return whether several integer codes are stored in one int32."""
        return self.format == CompressionFormat.pack_quantized

    @property
    def input_global_scale(self) -> float | None:
        """Fp32 factor above NVFP4 activation scales, the same for every layer.

        None for other activations.
        """
        args = self.activations
        has_factor = args and args.strategy == QuantizationStrategy.TENSOR_GROUP
        return INPUT_GLOBAL_SCALE if has_factor else None

    @property
    def fuses_scales(self) -> bool:
        """Return whether layers that the engine multiplies together (q, k and v) share a
        tensor-wide weight scale.
        """
        args = self.weights
        return args is not None and args.strategy == QuantizationStrategy.TENSOR_GROUP

    def leaves_alone(self, layer: str) -> bool:
        """Return whether the linear layer of this checkpoint name stays in the compute dtype."""
        return self.quantization is None or is_protected(layer)

    def check_layer(self, layer: str, shape: tuple[int, int]) -> None:
        """Raise `SchemeError` if a weight of `shape` (O, I) cannot be stored in this scheme."""
        SCHEME_SPECS[self.name].check_layer(layer, shape)


def write_quantization_config(
    groups: Sequence[tuple[Scheme, Sequence[str]]],
    ignore: Sequence[str],
    kv_cache: str | None = None,
) -> dict[str, Any] | None:
    """Return the `quantization_config` for config.json; None if there are no groups.

    Args:
        groups: quantized schemes with the targets of each. A target is a module class or a layer
            name, in the form that readers of the file match.
        ignore: layers in the compute dtype.
        kv_cache: "fp8", or None for a cache in the compute dtype.

    Raises:
        SchemeError: `kv_cache` is set but there are no groups.
    """
    written = {}
    formats = []
    for scheme, targets in groups:
        assert scheme.quantization is not None
        assert scheme.format is not None
        changes = {"format": scheme.format, "targets": list(targets)}
        written[f"group_{len(written)}"] = scheme.quantization.model_copy(update=changes)
        formats.append(scheme.format)
    if not written and kv_cache is not None:
        raise SchemeError(
            f"quantization.kv_cache {kv_cache!r} of a model without a low-bit layer, whose"
            " config.json has no place to state it; quantize one, or omit it"
        )
    if not written:
        return None
    cache = QuantizationArgs(num_bits=8, type=QuantizationType.FLOAT, dynamic=False)
    same_format = len(set(formats)) == 1
    overall_format = formats[0] if same_format else CompressionFormat.mixed_precision
    config = QuantizationConfig(
        config_groups=written,
        format=overall_format.value,
        ignore=list(ignore),
        quantization_status=QuantizationStatus.COMPRESSED,
        kv_cache_scheme=None if kv_cache is None else cache,
    )
    return config.model_dump(mode="json")


def is_protected(layer: str) -> bool:
    """Return whether a layer's name is one that no scheme quantizes unless a rule names it."""
    return _PROTECTED.fullmatch(layer) is not None


def _scheme(spec: SchemeSpec) -> Scheme:
    """Return the scheme of one line of the table, in compressed-tensors' terms."""
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
    """Return the compressed-tensors arguments of weight or activation codes.

    dynamic: True for activations, whose scales are computed at each forward.
    """
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
        if dynamic:
            # LOCAL: group scales are dynamic, the tensor-wide one comes from the checkpoint.
            return QuantizationArgs(
                **arguments, dynamic=DynamicType.LOCAL, observer="static_minmax"
            )
    return QuantizationArgs(**arguments, dynamic=dynamic)


SCHEMES: dict[str, Scheme] = {name: _scheme(spec) for name, spec in SCHEME_SPECS.items()}
"""All schemes, by name."""


def get_scheme(name: str) -> Scheme:
    """Return the scheme of that name.

    Raises `SchemeError`, which quotes the name, the known ones and the nearest, if it is unknown.
    """
    return SCHEMES[name] if name in SCHEMES else SCHEMES[known_scheme(name)]


def scheme_of_args(
    weights: QuantizationArgs | None, activations: QuantizationArgs | None
) -> Scheme | None:
    """Return the named scheme with these arguments, which an engine parsed from a checkpoint.

    None if no scheme has them.
    """

    def meaning(args: QuantizationArgs | None) -> tuple[Any, ...] | None:
        return args and _MEANING(args)

    wanted = (meaning(weights), meaning(activations))
    for scheme in SCHEMES.values():
        if (meaning(scheme.weights), meaning(scheme.activations)) == wanted:
            return scheme
    return None


def is_integer(args: QuantizationArgs) -> bool:
    """Return whether codes are integers rather than floating-point numbers."""
    return args.type == QuantizationType.INT


def describe_weights(scheme: Scheme) -> str:
    """Describe a scheme's weights, e.g. "int4, group 128"."""
    args = scheme.weights
    if args is None:
        return "compute dtype"
    if scheme.block:
        return f"{_type(args)}, block {scheme.block[0]}×{scheme.block[1]}"
    if scheme.group_size:
        return f"{_type(args)}, group {scheme.group_size}"
    return f"{_type(args)}, per channel"


def describe_activations(scheme: Scheme) -> str:
    """Describe a scheme's activations, e.g. "int8, dynamic per token"."""
    args = scheme.activations
    if args is None:
        return "compute dtype"
    span = f"token group {args.group_size}" if args.strategy in _GROUPED else "token"
    symmetry = "" if args.symmetric else " asymmetric"
    return f"{_type(args)}{symmetry}, dynamic per {span}"


def _type(args: QuantizationArgs) -> str:
    """Return the name of the codes' number format."""
    if is_integer(args):
        return f"int{args.num_bits}"
    if args.num_bits == 8:
        return "fp8 e4m3"
    return "nvfp4" if args.strategy == QuantizationStrategy.TENSOR_GROUP else "mxfp4"
