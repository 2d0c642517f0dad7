"""Named quantization schemes: the one place that states bits, granularity, rounding range and ignored layers.

A scheme wraps a `compressed_tensors.QuantizationScheme`. Materialization, the learner's products, the
published stream and the `quantization_config` vLLM reads are all derived from that one object.

Axes: O output rows, I input columns, Q quantization groups.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
    QuantizationType,
    preset_name_to_scheme,
)

from qarl.configs.errors import SchemeError
from qarl.configs.scheme_names import check_scheme_name

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MASTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ALWAYS_IGNORED = ("lm_head", r"re:.*embed_tokens$", r"re:.*\.(gate|router|shared_expert_gate)$")
"""Layers every scheme leaves in the compute dtype: embeddings, output head, expert routers."""

FP8_MAX = float(torch.finfo(torch.float8_e4m3fn).max)
FP4_MAX = 6.0

INPUT_GLOBAL_SCALE = 1.0
"""NVFP4 stores activations as code · e4m3 scale / input_global_scale, and expects that factor from a calibration.

In reinforcement learning nothing is calibrated: a factor measured on the first policy would clip the later one's
outliers, and one that is measured again and again would make a weight version depend on the data it last saw. So it is
1, what compressed-tensors gives layers no calibration token reached. Groups of 16 activations with a maximum from 0.09
to 2688 then have a scale of full e4m3 precision, smaller ones a coarser one, and below 0.006 they become zero.
Learner and engine do the same, so training sees, and learns around, what that costs.
"""

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


@dataclass(frozen=True)
class Scheme:
    """How weights and activations of a model's linear layers are represented.

    name: as the field writes it (`w4a16`, …). quantization: None for the unquantized `bf16` scheme.
    format: how codes are stored in a checkpoint. ignore: layer names or `re:` patterns left alone.
    bound: on the mean |Δ log p| a token (canary) and the mean |log w| a sequence (step-0 gate) between learner and
    engine, in nats; k3_bound: on the k3 estimate of KL(sampler ‖ learner). Beyond them a run stops
    (docs/explain/mismatch.md says how they were chosen).
    """

    name: str
    quantization: QuantizationScheme | None
    format: CompressionFormat | None = None
    ignore: tuple[str, ...] = field(default=ALWAYS_IGNORED)
    bound: float = 0.05
    k3_bound: float = 0.005

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
        """Input columns that share one scale; None when a whole row does (or nothing is quantized)."""
        args = self.weights
        return self.block[1] if self.block else args.group_size if args and args.strategy in _GROUPED else None

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) that share one scale, where scales go by blocks of both; else None."""
        args = self.weights
        if args is None or args.strategy != QuantizationStrategy.BLOCK or args.block_structure is None:
            return None
        return args.block_structure[0], args.block_structure[1]

    @property
    def packs_integers(self) -> bool:
        """Whether integer codes are stored several to an int32."""
        return self.format == CompressionFormat.pack_quantized

    @property
    def input_global_scale(self) -> float | None:
        """The fp32 factor above NVFP4 activation scales, the same for every layer; None for other activations."""
        args = self.activations
        return INPUT_GLOBAL_SCALE if args and args.strategy == QuantizationStrategy.TENSOR_GROUP else None

    @property
    def fuses_scales(self) -> bool:
        """Whether a tensor-wide weight scale must agree over layers the engine multiplies together (q, k and v)."""
        args = self.weights
        return args is not None and args.strategy == QuantizationStrategy.TENSOR_GROUP

    def leaves_alone(self, layer: str) -> bool:
        """Whether the linear layer of this checkpoint name stays in the compute dtype."""
        return self.quantization is None or any(_matches(pattern, layer) for pattern in self.ignore)

    def check_layer(self, layer: str, shape: tuple[int, int]) -> None:
        """Raise `SchemeError` if a weight of `shape` (O, I) cannot be stored in this scheme."""
        remedy = "choose a per-channel scheme ('w8a8', 'fp8'), 'bf16', or another model"
        group = self.group_size
        if group and shape[1] % group:
            raise SchemeError(
                f"scheme {self.name!r}: layer {layer!r} has {shape[1]} input columns, no multiple of the group "
                f"size {group}; {remedy}"
            )
        if self.block and shape[0] % self.block[0]:
            raise SchemeError(
                f"scheme {self.name!r}: layer {layer!r} has {shape[0]} output rows, no multiple of the block's "
                f"{self.block[0]}; {remedy}"
            )
        args = self.weights
        if args and self.packs_integers and shape[1] % (32 // args.num_bits):
            raise SchemeError(
                f"scheme {self.name!r}: layer {layer!r} has {shape[1]} input columns; int{args.num_bits} codes are "
                f"packed {32 // args.num_bits} to an int32, so the count must be a multiple of {32 // args.num_bits}"
            )

    def quantization_config(self, ignored_layers: list[str]) -> dict[str, Any] | None:
        """The `quantization_config` for config.json that vLLM and transformers read; None when unquantized.

        ignored_layers: full names of the linear layers left alone, as the model has them.
        """
        if self.quantization is None or self.format is None:
            return None
        group = self.quantization.model_copy(update={"format": self.format})
        config = QuantizationConfig(
            config_groups={"group_0": group},
            format=self.format.value,
            ignore=sorted(ignored_layers),
            quantization_status=QuantizationStatus.COMPRESSED,
        )
        return config.model_dump(mode="json")


def is_protected(layer: str) -> bool:
    """Whether a layer is an embedding, an output head or a router by its name (`ALWAYS_IGNORED`)."""
    return any(_matches(pattern, layer) for pattern in ALWAYS_IGNORED)


def _matches(pattern: str, layer: str) -> bool:
    return bool(re.match(pattern[3:], layer)) if pattern.startswith("re:") else pattern == layer


def _preset(name: str) -> QuantizationScheme:
    return preset_name_to_scheme(name, targets=["Linear"])


def _int4(group_size: int | None) -> QuantizationScheme:
    """The W4A16 preset with another group size; None: a scale a row."""
    strategy = QuantizationStrategy.GROUP if group_size else QuantizationStrategy.CHANNEL
    weights = QuantizationArgs(num_bits=4, strategy=strategy, group_size=group_size, symmetric=True)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def _w4a8() -> QuantizationScheme:
    """The W4A8 preset with asymmetric activation codes, which is what vLLM's kernel computes whatever is written."""
    preset = _preset("W4A8")
    activations = preset.input_activations
    assert activations is not None
    return preset.model_copy(update={"input_activations": activations.model_copy(update={"symmetric": False})})


_PACKED, _INTS, _FLOATS = (
    CompressionFormat.pack_quantized,
    CompressionFormat.int_quantized,
    CompressionFormat.float_quantized,
)

# Formats are those compressed-tensors infers for a scheme, but for w4afp8, which vLLM reads packed only.
SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme("bf16", None),
        Scheme("w4a16", _preset("W4A16"), _PACKED),
        Scheme("w4a16-g64", _int4(64), _PACKED),
        Scheme("w4a16-g32", _int4(32), _PACKED),
        Scheme("w4a16-channel", _int4(None), _PACKED),
        Scheme("w8a16", _preset("W8A16"), _PACKED),
        Scheme("w8a8", _preset("W8A8"), _INTS),
        Scheme("w4a8", _w4a8(), _INTS),
        Scheme("w4afp8", _preset("W4AFP8"), _PACKED, bound=0.1, k3_bound=0.01),
        Scheme("fp8", _preset("FP8_DYNAMIC"), _FLOATS, bound=0.1, k3_bound=0.01),
        Scheme("fp8-block", _preset("FP8_BLOCK"), _FLOATS, bound=0.1, k3_bound=0.01),
        Scheme("nvfp4a16", _preset("NVFP4A16"), CompressionFormat.nvfp4_pack_quantized),
        Scheme("nvfp4", _preset("NVFP4"), CompressionFormat.nvfp4_pack_quantized, bound=0.2, k3_bound=0.04),
        Scheme("mxfp4a16", _preset("MXFP4A16"), CompressionFormat.mxfp4_pack_quantized),
    )
}


def get_scheme(name: str) -> Scheme:
    """The scheme of that name. Raises `SchemeError` quoting the name, the known ones and the nearest."""
    check_scheme_name(name)
    return SCHEMES[name]


def scheme_of_args(weights: QuantizationArgs | None, activations: QuantizationArgs | None) -> Scheme | None:
    """The named scheme with these arguments, as an engine parsed them from a checkpoint; None if none is known."""

    def meaning(args: QuantizationArgs | None) -> tuple[Any, ...] | None:
        return args and (
            args.num_bits,
            args.type,
            args.strategy,
            args.group_size,
            args.block_structure,
            args.symmetric,
            args.dynamic,
        )

    for scheme in SCHEMES.values():
        if meaning(scheme.weights) == meaning(weights) and meaning(scheme.activations) == meaning(activations):
            return scheme
    return None


def is_integer(args: QuantizationArgs) -> bool:
    """Whether codes are integers (else float8 e4m3)."""
    return args.type == QuantizationType.INT


def describe_weights(scheme: Scheme) -> str:
    """A scheme's weights in words, e.g. "int4, group 128"."""
    args = scheme.weights
    if args is None:
        return "compute dtype"
    if scheme.block:
        return f"{_type(args)}, block {scheme.block[0]}×{scheme.block[1]}"
    return f"{_type(args)}, group {scheme.group_size}" if scheme.group_size else f"{_type(args)}, per channel"


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
