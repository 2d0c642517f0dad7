"""Named quantization schemes: the one place that states bits, granularity, rounding range and ignored layers.

A scheme wraps a `compressed_tensors.QuantizationScheme`. Materialization, the learner's products, the
published stream and the `quantization_config` vLLM reads are all derived from that one object.

Axes: O output rows, I input columns, Q quantization groups.
"""

import difflib
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

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MASTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ALWAYS_IGNORED = ("lm_head", r"re:.*embed_tokens$", r"re:.*\.(gate|router|shared_expert_gate)$")
"""Layers every scheme leaves in the compute dtype: embeddings, output head, expert routers."""


class SchemeError(ValueError):
    """A scheme that is unknown, or that a layer of the model cannot take."""


@dataclass(frozen=True)
class Scheme:
    """How weights and activations of a model's linear layers are represented.

    name: as the field writes it (`w4a16`, …). quantization: None for the unquantized `bf16` scheme.
    format: how codes are stored in a checkpoint. ignore: layer names or `re:` patterns left alone.
    bound: on the mean |Δ log p| a token (canary) and the mean |log w| a sequence (step-0 gate) between learner and
    engine, in nats; k3_bound: on the k3 estimate of KL(sampler ‖ learner). Beyond them a run stops
    (docs/mismatch.md says how they were chosen).
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
        return args.group_size if args and args.strategy == QuantizationStrategy.GROUP else None

    def leaves_alone(self, layer: str) -> bool:
        """Whether the linear layer of this checkpoint name stays in the compute dtype."""
        return self.quantization is None or any(_matches(pattern, layer) for pattern in self.ignore)

    def check_layer(self, layer: str, shape: tuple[int, int]) -> None:
        """Raise `SchemeError` if a weight of `shape` (O, I) cannot be stored in this scheme."""
        group = self.group_size
        if group and shape[1] % group:
            raise SchemeError(
                f"scheme {self.name!r}: layer {layer!r} has {shape[1]} input columns, no multiple of the group "
                f"size {group}; choose a per-channel scheme ('w8a8', 'fp8'), 'bf16', or another model"
            )
        args = self.weights
        if args and args.num_bits == 4 and shape[1] % 8:
            raise SchemeError(
                f"scheme {self.name!r}: layer {layer!r} has {shape[1]} input columns; int4 codes are packed "
                "eight to an int32, so the count must be a multiple of 8"
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


def _matches(pattern: str, layer: str) -> bool:
    return bool(re.match(pattern[3:], layer)) if pattern.startswith("re:") else pattern == layer


def _preset(name: str) -> QuantizationScheme:
    return preset_name_to_scheme(name, targets=["Linear"])


SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme("bf16", None),
        Scheme("w4a16", _preset("W4A16"), CompressionFormat.pack_quantized),
        Scheme("w8a8", _preset("W8A8"), CompressionFormat.int_quantized),
        Scheme("fp8", _preset("FP8_DYNAMIC"), CompressionFormat.float_quantized, bound=0.1, k3_bound=0.01),
    )
}


def get_scheme(name: str) -> Scheme:
    """The scheme of that name. Raises `SchemeError` quoting the name, the known ones and the nearest."""
    if name in SCHEMES:
        return SCHEMES[name]
    near = difflib.get_close_matches(name, SCHEMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SchemeError(f"unknown scheme {name!r}: known are {', '.join(map(repr, SCHEMES))}{hint}")


def scheme_of_args(weights: QuantizationArgs | None, activations: QuantizationArgs | None) -> Scheme | None:
    """The named scheme with these arguments, as an engine parsed them from a checkpoint; None if none is known."""

    def meaning(args: QuantizationArgs | None) -> tuple[Any, ...] | None:
        return args and (
            args.num_bits,
            args.type,
            args.strategy,
            args.group_size,
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
    granularity = f"group {scheme.group_size}" if scheme.group_size else "per channel"
    return f"{_type(args)}, {granularity}"


def describe_activations(scheme: Scheme) -> str:
    """A scheme's activations in words, e.g. "int8, dynamic per token"."""
    args = scheme.activations
    return "compute dtype" if args is None else f"{_type(args)}, dynamic per token"


def _type(args: QuantizationArgs) -> str:
    return f"int{args.num_bits}" if is_integer(args) else "fp8 e4m3"
