"""What a quantized checkpoint must look like, and reading llmcompressor's as such."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    """A checkpoint of one model in one scheme, but for its values.

    tensors: (name, shape, dtype) in stream order. ignored: linear layers left alone, by full name.
    config: contents of config.json. layers: as an engine that loaded it must report them. experts:
    its names of an expert's matrices.
    """

    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]
    ignored: tuple[str, ...]
    config: dict[str, Any]
    layers: list[LayerReport]
    experts: ExpertLayout


def checkpoint_layout(folder: Path, scheme: str, dtype: str) -> Layout:
    """The layout the unquantized checkpoint in `folder` has once it is in `scheme`: that of QaRL's
    own export.

    dtype: compute dtype, by name. Raises `SchemeError` for a layer the scheme cannot hold.
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
        layers=model.layers(),
        experts=experts,
    )


def read_as(layout: Layout, folder: Path) -> Iterator[LowBitTensor]:
    """The tensors of the checkpoint in `folder`, in the layout's order.

    All are checked before the first is handed out. Raises `ExportError` where one is missing,
    additional, or of another shape or dtype: a layer was left unquantized, or one quantized that
    should not be.
    """
    where: dict[str, tuple[Path, str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            where |= {_renamed(name, layout.experts): (file, name) for name in opened.keys()}  # noqa: SIM118
    expected = [name for name, _, _ in layout.tensors]
    _refuse("lacks", [name for name in expected if name not in where])
    _refuse("has in addition", sorted(where.keys() - set(expected)))
    for name, shape, dtype in layout.tensors:
        tensor = _read(*where[name])
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ExportError(
                f"llmcompressor wrote {name!r} as {tensor.dtype} {list(tensor.shape)}, the scheme"
                f" stores it as {dtype} {list(shape)}; this model and method do not go together"
            )
    return (LowBitTensor(name, _read(*where[name])) for name in expected)


def _renamed(name: str, experts: ExpertLayout) -> str:
    """llmcompressor calls every model's expert matrices gate_proj, up_proj and down_proj; the
    checkpoint's name.
    """
    words = dict(zip(ExpertLayout().projections, experts.projections, strict=True))
    return _EXPERT.sub(lambda match: match[1] + words[match[2]], name)


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def _refuse(what: str, names: list[str]) -> None:
    if names:
        raise ExportError(
            f"llmcompressor's checkpoint {what} {few(names)}, going by the scheme; this model and"
            " method do not go together"
        )
