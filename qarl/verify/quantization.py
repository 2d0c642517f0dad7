"""What a compressed-tensors configuration says of each layer, and how its codes are read.

Axes: O output rows, I input columns, Q quantization groups.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.utils.match import match_name
from pydantic import ValidationError

from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.schemes import Scheme, scheme_of_args
from qarl.verify.findings import VerifyInputError

CODES = ("weight_packed", "weight_scale")
"""Tensors of which a layer with codes has one at least."""
_METHOD = "compressed-tensors"
_FIELDS = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "dynamic")
"""Fields of quantization arguments that decide what is computed."""


@dataclass(frozen=True)
class Quantization:
    """A parsed `quantization_config`."""

    config: QuantizationConfig
    """The configuration, as compressed-tensors reads it."""

    @classmethod
    def parse(cls, settings: Any, where: str) -> "Quantization":
        """Return the configuration.

        Raises `VerifyInputError` for one of another method, or one that compressed-tensors refuses.
        """
        if not isinstance(settings, Mapping):
            raise VerifyInputError(
                f"{where}: quantization_config is a {type(settings).__name__}; it must be an object"
            )
        inner = settings.get("quantization_config", settings)
        method = inner.get("quant_method", _METHOD)
        if method != _METHOD:
            raise VerifyInputError(
                f"{where}: quantization format {method!r} is unknown; known is {_METHOD!r}: convert"
                " the checkpoint, or give the dequantized one"
            )
        try:
            config = QuantizationConfig.model_validate(dict(inner))
            formats = {config.format}
            for group in config.config_groups.values():
                assert isinstance(group, QuantizationScheme)  # presets became schemes
                formats.add(group.format or config.format)
            for name in formats:
                CompressionFormat(name)
        except (ValidationError, ValueError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()
            raise VerifyInputError(
                f"{where}: compressed-tensors refuses its quantization_config:"
                f" {' '.join(reason[:3])}; known formats are"
                f" {', '.join(each.value for each in CompressionFormat)}"
            ) from error
        return cls(config)

    def ignored_by(self, layer: str) -> str | None:
        """Return the ignore entry that matches a layer, or None."""
        return next((e for e in self.config.ignore or () if match_name(layer, e)), None)

    def scheme(self, layer: str) -> QuantizationScheme | None:
        """Return the scheme that the configuration gives a linear layer, or None.

        A name counts before a pattern, a pattern before a class. "Linear" does not mean an output
        head, which is none in an engine.
        """
        if self.ignored_by(layer) is not None:
            return None
        ranked = []
        for group in self.config.config_groups.values():
            assert isinstance(group, QuantizationScheme)
            for target in group.targets:
                if match_name(layer, target):
                    ranked.append((target.startswith("re:"), len(ranked), group))
                elif target == "Linear" and not layer.endswith("lm_head"):
                    ranked.append((2, len(ranked), group))
        return min(ranked, key=lambda each: each[:2])[2] if ranked else None

    def substring_of(self, layer: str) -> str | None:
        """Return an ignore entry that is part of a layer's name without matching it, or None."""
        for entry in self.config.ignore or ():
            text = re.sub(r"^re:|[\^$]|\.\*|\\", "", entry)
            if text and text in layer and not match_name(layer, entry):
                return entry
        return None


def describe(scheme: QuantizationScheme | None) -> str:
    """Return a scheme in words, such as "int4 group 64 symmetric"."""
    if scheme is None or scheme.weights is None:
        return "unquantized"

    def words(args: Any) -> str:
        kind, strategy = (str(getattr(each, "value", each)) for each in (args.type, args.strategy))
        block = "×".join(map(str, args.block_structure or ()))
        span = {
            "group": f"group {args.group_size}",
            "tensor_group": f"group {args.group_size}",
            "block": f"block {block}",
        }
        symmetry = "" if args.symmetric else " asymmetric"
        return f"{kind}{args.num_bits} {span.get(strategy, strategy)}{symmetry}"

    inputs = scheme.input_activations
    return words(scheme.weights) + (f", inputs {words(inputs)}" if inputs else "")


def same(one: QuantizationScheme | None, other: QuantizationScheme | None) -> bool:
    """Return whether two schemes compute the same."""

    def meaning(args: Any) -> Any:
        return None if args is None else tuple(getattr(args, name) for name in _FIELDS)

    def both(scheme: QuantizationScheme | None) -> Any:
        if scheme is None or scheme.weights is None:
            return None
        return meaning(scheme.weights), meaning(scheme.input_activations)

    return both(one) == both(other)


def named(scheme: QuantizationScheme) -> Scheme | None:
    """Return QaRL's scheme with these arguments, or None."""
    return scheme_of_args(scheme.weights, scheme.input_activations)


def compressor(scheme: QuantizationScheme, config: QuantizationConfig) -> Any:
    """Return compressed-tensors' compressor of a layer's format."""
    format = scheme.format or config.format
    if format in (CompressionFormat.mixed_precision.value, CompressionFormat.dense.value, None):
        format = infer_module_format(torch.nn.Linear, scheme)
    return BaseCompressor.get_value_from_registry(CompressionFormat(format).value)


def dequantized(
    tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme, config: QuantizationConfig
) -> torch.Tensor:
    """Return the values of a layer's codes by compressed-tensors' own decompression, fp32 [O, I].

    tensors: by their names in the layer, such as "weight_packed".
    """
    as_fp32 = {
        name: tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        for name, tensor in tensors.items()
    }
    return compressor(scheme, config).decompress(as_fp32, scheme)["weight"].float()


def nearest(
    master: torch.Tensor, tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme
) -> torch.Tensor | None:
    """Return a master [O, I] rounded to the nearest codes under a layer's own scales, fp32 [O, I].

    None if its scales are not of a kind that can be used so.
    """
    scale = tensors.get("weight_scale")
    zero_point = tensors.get("weight_zero_point")
    if scale is None or scale.dtype == torch.uint8 or zero_point is not None:
        return None
    assert scheme.weights is not None
    return fake_quantize(
        master.float(),
        scale.float(),
        None,  # type: ignore[arg-type]
        scheme.weights,
        tensors.get("weight_g_idx"),
        tensors.get("weight_global_scale"),
    ).float()


def rounded(
    master: torch.Tensor, scheme: QuantizationScheme, dtype: torch.dtype, layer: str
) -> LowBitWeight | None:
    """Return a master [O, I] rounded to nearest by the scheme, with scales from its own extremes.

    None if the scheme has no name in QaRL, or does not fit the shape.

    dtype: of the scales.
    """
    own = named(scheme)
    if own is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    try:
        return materialize(master, own, dtype, layer)
    except ValueError:  # its message is about training: here the shape is the finding
        return None
