"""Whether a checkpoint has every expert: read from its headers, before anything is loaded.

transformers stacks the experts it finds; where some are missing it reports shapes of the stack, not which are missing.

Axes: E experts.
"""

import re
from pathlib import Path

from transformers import PreTrainedModel

from qarl.quant.checkpoint.families import family_of, fused_experts
from qarl.quant.checkpoint.folder import tensor_shapes, weight_files
from qarl.quant.checkpoint.shapes import weight_shapes


def expert_faults(folder: Path, model: PreTrainedModel) -> list[str]:
    """What is wrong with the experts' tensors in `folder`, one phrase each, naming the tensor; empty if nothing.

    model: its architecture, may be on the meta device. A layer of which the checkpoint has no expert under the
    layout's names is left to the loader: it may be stored fused, or under a prefix the loader strips.
    """
    layers = [family_of(model.config.model_type).checkpoint_name(name) for name, _ in fused_experts(model)]
    stored = tensor_shapes(folder) if layers and weight_files(folder) else {}
    expected = {f"{name}.weight": shape for name, shape in weight_shapes(model).items()}
    return [fault for layer in layers for fault in _layer_faults(layer, expected, stored)]


def _layer_faults(layer: str, expected: dict[str, tuple[int, int]], stored: dict[str, list[int]]) -> list[str]:
    one = re.compile(rf"{re.escape(layer)}\.\d+\.")
    mine = {name: shape for name, shape in expected.items() if one.match(name)}
    present = [name for name in stored if one.match(name)]
    if not present:
        return []
    lacking = [f"{name!r} is missing" for name in mine if name not in stored]
    beyond = [f"{name!r} is of none of them" for name in present if name not in mine]
    sizes = [
        f"{name!r} is {stored[name]} instead of {list(shape)}"
        for name, shape in mine.items()
        if name in stored and stored[name] != list(shape)
    ]
    return lacking + beyond + sizes
