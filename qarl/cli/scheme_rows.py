"""The rows of `qarl schemes`, computed: sizes from a model's shapes, kernels asked on this machine."""

from typing import Any

import torch
from transformers import PreTrainedModel

from qarl.cli.scheme_row import REFERENCE_SHAPE, SchemeRow
from qarl.configs.schemes import SCHEME_SPECS
from qarl.quant.checkpoint.load import empty_model, load_config
from qarl.quant.checkpoint.shapes import expert_modules, weight_shapes
from qarl.quant.kernels.supported import Support, kept_support
from qarl.quant.schemes import (
    COMPUTE_DTYPES,
    SCHEMES,
    Scheme,
    SchemeError,
    describe_activations,
    describe_weights,
    get_scheme,
)


def compute_rows(model: str | None, dtype: str, kernel: str) -> list[SchemeRow]:
    """A row per scheme.

    model: folder, hub id or embedded name, of which only config.json is read; None: a layer of `REFERENCE_SHAPE`.
    dtype: compute dtype, a key of COMPUTE_DTYPES. kernel: the learner's kernel family.
    Raises `ModelError` for a model whose configuration cannot be read.
    """
    empty = None if model is None else empty_model(_architecture(model))
    return [_row(scheme, empty, COMPUTE_DTYPES[dtype], kernel) for scheme in SCHEMES.values()]


def _architecture(name: str) -> Any:
    from qarl.embedded.recipe import RECIPES, recipe_config, tiny_names

    return recipe_config(RECIPES[name]) if name in tiny_names() else load_config(name)


def _row(scheme: Scheme, model: PreTrainedModel | None, dtype: torch.dtype, kernel: str) -> SchemeRow:
    experts = model is not None and bool(expert_modules(model))
    learner, engine = (kept_support(scheme.name, dtype, family, experts) for family in (kernel, "vllm"))
    per_parameter, total, reason = None, None, ""
    try:
        per_parameter, total = _bytes(scheme, model, dtype)
    except SchemeError as error:
        reason = str(error)
    stored = scheme.format.value if scheme.format else "unquantized"
    words = (scheme.name, describe_weights(scheme), describe_activations(scheme), stored)
    return SchemeRow(*words, per_parameter, total, reason, *_usable(learner), *_usable(engine))


def _usable(support: Support) -> tuple[str, str]:
    return ("" if support.reason else support.kernel), support.reason


def _bytes(scheme: Scheme, model: PreTrainedModel | None, dtype: torch.dtype) -> tuple[float, int | None]:
    """Bytes per parameter of the quantized layers, and of the whole checkpoint. Raises `SchemeError` for shapes."""
    if model is None:
        rows, columns = REFERENCE_SHAPE
        return SCHEME_SPECS[scheme.name].weight_bytes(REFERENCE_SHAPE, dtype.itemsize) / (rows * columns), None
    shapes = _quantized_layers(scheme, model)
    for layer, shape in shapes.items():
        scheme.check_layer(layer, shape)
    quantized = sum(SCHEME_SPECS[scheme.name].weight_bytes(shape, dtype.itemsize) for shape in shapes.values())
    parameters = sum(rows * columns for rows, columns in shapes.values())
    others = sum(p.numel() for p in model.parameters()) - parameters
    return quantized / parameters, quantized + others * dtype.itemsize


def _quantized_layers(scheme: Scheme, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Shapes (O, I) of the matrices by checkpoint name; of `bf16`, those any other scheme would quantize."""
    selecting = scheme if scheme.quantization else get_scheme("w8a8")
    weights = weight_shapes(model)
    shapes = {name: shape for name, shape in weights.items() if not selecting.leaves_alone(name)}
    for name, shape in shapes.items():
        scheme.check_layer(name, shape)
    if not shapes:
        raise SchemeError(f"scheme {scheme.name!r} quantizes none of the model's {len(weights)} linear layers")
    return shapes
