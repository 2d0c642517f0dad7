"""The layout that a quantized checkpoint must have, and the check of llmcompressor's against it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from qarl.configs.words import few
from qarl.quant.checkpoint.families import ExpertLayout, family_of
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.sync.export import ExportError, checkpoint_config

_EXPERT = re.compile(rf"(\.experts\.\d+\.)({'|'.join(ExpertLayout().projections)})(?=\.)")


@dataclass(frozen=True)
class Layout:
    """A checkpoint of one model in one scheme, without its values."""

    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]
    """(name, shape, dtype) of each tensor, in stream order."""
    ignored: tuple[str, ...]
    """Full names of the linear layers that stay unquantized."""
    config: dict[str, Any]
    """Contents of config.json."""
    layers: list[LayerReport]
    """Layers as an engine that loaded the checkpoint must report them."""
    experts: ExpertLayout
    """The checkpoint's names of an expert's matrices."""


def checkpoint_layout(folder: Path, scheme: str, dtype: str) -> Layout:
    """Return the layout of the unquantized checkpoint in `folder` once it is in `scheme`.

    This is the layout of QaRL's own export. dtype: name of the compute dtype. Raises `SchemeError`
    for a layer that the scheme cannot hold.
    """
    compute = COMPUTE_DTYPES[dtype]
    masters = load_masters(folder, compute)
    model = LowBitModel(masters, get_scheme(scheme), LayerContext(compute, "reference"))
    experts = family_of(model.config.model_type).experts
    tensors = tuple(
        (item.name, item.tensor.shape, item.tensor.dtype) for item in model.low_bit_tensors()
    )
    return Layout(
        tensors=tensors,
        ignored=tuple(model.plan.ignored),
        config=checkpoint_config(model),
        layers=model.layer_reports(),
        experts=experts,
    )


def read_as(layout: Layout, folder: Path) -> Iterator[LowBitTensor]:
    """Return the tensors of the checkpoint in `folder`, in the layout's order.

    All are checked before the first is returned. Raises `ExportError` if one is missing, is not in
    the layout, or has another shape or dtype: the wrong layers were quantized.
    """
    sources: dict[str, tuple[Path, str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (an open file is not iterable)
                sources[_renamed(name, layout.experts)] = (file, name)
    expected = [name for name, _, _ in layout.tensors]
    _refuse("lacks", [name for name in expected if name not in sources])
    _refuse("has in addition", sorted(sources.keys() - set(expected)))
    for name, shape, dtype in layout.tensors:
        tensor = _read(*sources[name])
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ExportError(
                f"llmcompressor wrote {name!r} as {tensor.dtype} {list(tensor.shape)}, the scheme"
                f" stores it as {dtype} {list(shape)}; choose another --scheme or --ptq method"
            )
    return (LowBitTensor(name, _read(*sources[name])) for name in expected)


def _renamed(name: str, experts: ExpertLayout) -> str:
    """Return the checkpoint's name of a tensor.

    llmcompressor calls every model's expert matrices gate_proj, up_proj and down_proj.
    """
    plain = replace(ExpertLayout(), gate=experts.gate and ExpertLayout.gate)
    words = dict(zip(plain.projections, experts.projections, strict=True))
    return _EXPERT.sub(lambda match: match[1] + words[match[2]], name)


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def _refuse(what: str, names: list[str]) -> None:
    if names:
        raise ExportError(
            f"llmcompressor's checkpoint {what} {few(names)}, going by the scheme; choose"
            " another --scheme or --ptq method"
        )
