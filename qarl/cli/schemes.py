"""`qarl schemes`: every scheme, what it costs in bytes, and what would multiply it on this machine."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from quant.checkpoint.load import empty_model, load_config
from quant.checkpoint.shapes import expert_modules, weight_shapes
from quant.kernels.supported import Support, support
from quant.materialize.size import stored_bytes
from quant.schemes import (
    COMPUTE_DTYPES,
    SCHEMES,
    Scheme,
    SchemeError,
    describe_activations,
    describe_weights,
    get_scheme,
)

REFERENCE_SHAPE = (4096, 4096)
"""Output rows and input columns of the layer that stands for a model where none is given."""


@dataclass(frozen=True)
class SchemeRow:
    """One scheme. bytes_per_parameter: of the layers it quantizes, scales included; checkpoint_bytes: of all of the
    model's tensors, None without a model; both None where the model's shapes do not fit, as shape_reason says.

    learner_kernel, engine_kernel: what would multiply, as the audit names it, "" where nothing can, for the reason
    beside it.
    """

    name: str
    weights: str
    activations: str
    format: str
    bytes_per_parameter: float | None
    checkpoint_bytes: int | None
    shape_reason: str
    learner_kernel: str
    learner_reason: str
    engine_kernel: str
    engine_reason: str


def scheme_rows(model: str | None, dtype: str, kernel: str = "auto") -> list[SchemeRow]:
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
    learner, engine = (support(scheme.name, dtype, family, experts) for family in (kernel, "vllm"))
    per_parameter, total, reason = None, None, ""
    try:
        per_parameter, total = _bytes(scheme, model, dtype)
    except SchemeError as error:
        reason = str(error)
    stored = scheme.format.value if scheme.format else "unquantized"
    words = (scheme.name, describe_weights(scheme), describe_activations(scheme), stored)
    return SchemeRow(*words, per_parameter, total, reason, *_usable(learner), *_usable(engine))


def _usable(found: Support) -> tuple[str, str]:
    return ("" if found.reason else found.kernel), found.reason


def _bytes(scheme: Scheme, model: PreTrainedModel | None, dtype: torch.dtype) -> tuple[float, int | None]:
    """Bytes per parameter of the quantized layers, and of the whole checkpoint. Raises `SchemeError` for shapes."""
    if model is None:
        rows, columns = REFERENCE_SHAPE
        return stored_bytes(scheme, REFERENCE_SHAPE, dtype) / (rows * columns), None
    shapes = _quantized_layers(scheme, model)
    quantized = sum(stored_bytes(scheme, shape, dtype) for shape in shapes.values())
    parameters = sum(rows * columns for rows, columns in shapes.values())
    others = sum(p.numel() for p in model.parameters()) - parameters
    return quantized / parameters, quantized + others * dtype.itemsize


def _quantized_layers(scheme: Scheme, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Shapes (O, I) of the matrices by checkpoint name; of `bf16`, those any other scheme would quantize."""
    selecting = scheme if scheme.quantization else get_scheme("w8a8")
    found = weight_shapes(model)
    shapes = {name: shape for name, shape in found.items() if not selecting.leaves_alone(name)}
    for name, shape in shapes.items():
        scheme.check_layer(name, shape)
    if not shapes:
        raise SchemeError(f"scheme {scheme.name!r} quantizes none of the model's {len(found)} linear layers")
    return shapes


def print_schemes(console: Console, rows: list[SchemeRow], model: str | None) -> None:
    """The table, and below it the reasons of what it leaves open."""
    of = f"the layers of {model}" if model else "a layer of {}×{}".format(*REFERENCE_SHAPE)
    table = Table(title=f"bytes per parameter: {of}, scales included")
    table.add_column("scheme", no_wrap=True)
    table.add_column("weights")
    table.add_column("activations")
    table.add_column("bytes/param", justify="right", no_wrap=True)
    if model:
        table.add_column("checkpoint", justify="right", no_wrap=True)
    same = all(row.learner_kernel == row.engine_kernel for row in rows)
    for user in ("learner and engine",) if same else ("learner", "engine"):
        table.add_column(user, overflow="fold")
    for row in rows:
        per = "–" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.4f}"
        size = ["–" if row.checkpoint_bytes is None else _size(row.checkpoint_bytes)] if model else []
        kernels = [row.engine_kernel or "–"] if same else [row.learner_kernel or "–", row.engine_kernel or "–"]
        table.add_row(row.name, row.weights, row.activations, per, *size, *kernels)
    console.print(table)
    for reason, names in _reasons(rows).items():
        console.print(f"{', '.join(names)}: {reason}", markup=False, highlight=False, soft_wrap=True)


def _reasons(rows: list[SchemeRow]) -> dict[str, list[str]]:
    """What keeps a scheme from running here → names of the schemes it keeps."""
    found: dict[str, list[str]] = {}
    for row in rows:
        reasons = [row.shape_reason]
        if row.learner_reason == row.engine_reason:
            reasons.append(row.engine_reason and f"neither learner nor engine here: {row.engine_reason}")
        else:
            reasons.append(row.learner_reason and f"not in the learner here: {row.learner_reason}")
            reasons.append(row.engine_reason and f"not in the engine here: {row.engine_reason}")
        for reason in filter(None, reasons):
            found.setdefault(reason, []).append(row.name)
    return found


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def rows_as_data(rows: list[SchemeRow]) -> list[dict[str, Any]]:
    """The rows as plain data for JSON."""
    return [dataclasses.asdict(row) for row in rows]
