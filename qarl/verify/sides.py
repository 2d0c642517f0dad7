"""The two sides whose weights are compared: checkpoint folders, named tensors, a running vLLM.

Tensors are read one at a time.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors import safe_open

from qarl.configs.errors import ModelError
from qarl.quant.checkpoint.folder import (
    read_config,
    tensor_shapes,
    text_config,
    weight_files,
)
from qarl.verify.engines import HeldExperts, RunningEngine, read_llm, read_server
from qarl.verify.findings import VerifyInputError
from qarl.verify.folders import require_folder
from qarl.verify.names import Stored, canonical
from qarl.verify.quantization import CODES, Quantization, dequantized
from qarl.verify.server import is_url


@dataclass(frozen=True)
class Side:
    """A trainer's or an engine's weights."""

    role: str
    """"trainer" or "engine"."""
    config: Mapping[str, Any]
    """Settings of config.json; {} if unknown."""
    quantization: Quantization | None
    """Which layers are quantized and how; None if that is unknown, or nothing is."""
    layers: Mapping[str, Mapping[str, Stored]]
    """Layer → its tensors, by their names in it, such as "weight_packed"."""
    effective: bool = False
    """Whether weights were read through the layers' own products, so that codes are not seen."""
    experts: tuple[HeldExperts, ...] = ()
    """Routed experts that can be asked for their outputs alone, of a running engine."""
    unread: tuple[str, ...] = ()
    """What of the side cannot be read, in sentences."""
    check: Callable[[], None] = lambda: None
    """Raises `VerifyInputError` if the side changed while it was read."""

    def read(self, layer: str) -> dict[str, torch.Tensor]:
        """Return a layer's tensors, on the CPU."""
        return {name: stored.load().detach().cpu() for name, stored in self.layers[layer].items()}

    def is_linear(self, layer: str) -> bool:
        """Return whether a layer multiplies by a matrix."""
        tensors = self.layers[layer]
        weight = tensors.get("weight")
        matrix = "weight_packed" in tensors or (weight is not None and len(weight.shape) == 2)
        return matrix and not layer.endswith("embed_tokens")

    def has_codes(self, layer: str) -> bool:
        """Return whether a layer's weight is codes."""
        if self.effective:
            if self.quantization is None or not self.is_linear(layer):
                return False
            return self.quantization.scheme(layer) is not None
        return any(leaf in self.layers[layer] for leaf in CODES)

    def stored_scheme(self, layer: str) -> QuantizationScheme | None:
        """Return the scheme of a layer's codes; None if it has none."""
        if self.quantization is None or not self.has_codes(layer):
            return None
        return self.quantization.scheme(layer)

    def weight(self, layer: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return a layer's weight in 16 or 32 bits, codes dequantized; None if it has none.

        tensors: what `read` returned of the layer.
        """
        scheme = self.stored_scheme(layer)
        if self.effective or scheme is None:
            return tensors.get("weight")
        assert self.quantization is not None
        return dequantized(tensors, scheme, self.quantization.config)


def open_side(source: Any, role: str, quantization: Quantization | None, other: Any) -> Side:
    """Return a side.

    Args:
        source: checkpoint folder, mapping of named tensors, module with a `state_dict`, vLLM's
            `LLM` in this process, or a vLLM server's URL.
        role: "trainer" or "engine".
        quantization: what the side means to quantize, if it does not say so itself.
        other: the other side's source, whose config.json is used where this one has none.

    Raises:
        VerifyInputError: the source is of none of these kinds, or cannot be read.
        ModelError: a folder is no checkpoint, or a file in it is cut short.
    """
    if is_url(source):
        return _running(read_server(source), role, quantization)
    if isinstance(source, str | Path):
        return _folder(Path(source).expanduser(), role, quantization, other)
    if hasattr(source, "llm_engine") and hasattr(source, "apply_model"):
        return _running(read_llm(source), role, quantization)
    if not isinstance(source, Mapping) and hasattr(source, "state_dict"):
        source = source.state_dict()
    if not isinstance(source, Mapping) or not source:
        raise VerifyInputError(
            f"the {role} is {type(source).__name__}; give a checkpoint folder, a mapping of named"
            " tensors, a module, a vLLM LLM in this process, or a vLLM server's URL"
        )
    for name, tensor in source.items():
        if not isinstance(tensor, torch.Tensor):
            raise VerifyInputError(
                f"the {role}'s {name!r} is {type(tensor).__name__}; it must be a tensor (gather"
                " sharded ones first)"
            )
    tensors = {name: _in_memory(tensor) for name, tensor in source.items()}
    config = _config_of(other)
    return Side(
        role=role,
        config=config,
        quantization=quantization,
        layers=_layers(canonical(tensors, config, role)),
        unread=(f"the {role}'s settings: tensors in memory have no config.json",),
    )


def read_quantization(file: str | Path) -> Quantization:
    """Return the quantization in a JSON file, a `quantization_config` or a config.json with one."""
    path = Path(file)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerifyInputError(
            f"quantization file {str(file)!r} cannot be read: {error}; give the"
            " quantization_config that the trainer means, as JSON"
        ) from error
    return Quantization.parse(settings, f"{str(file)!r}")


def _running(engine: RunningEngine, role: str, quantization: Quantization | None) -> Side:
    parsed = None
    if engine.quantization is not None:
        parsed = Quantization.parse(engine.quantization, f"the {role}")
        _require_no_other(role, quantization, f"the {role}, a running vLLM,")
    return Side(
        role=role,
        config=engine.config,
        quantization=parsed or quantization,
        layers=_layers(canonical(engine.tensors, engine.config, role)),
        effective=True,
        experts=engine.experts,
        unread=engine.unread,
        check=engine.check,
    )


def _folder(folder: Path, role: str, quantization: Quantization | None, other: Any) -> Side:
    require_folder(folder, role)
    unread: tuple[str, ...] = ()
    if (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        config = read_config(folder)
    else:  # prime-rl's broadcasts are weights alone
        config = _config_of(other)
        for name in ("quantization_config", "compression_config"):
            config.pop(name, None)
        unread = (f"the {role}'s settings: {str(folder)!r} has no config.json",)
    shapes = tensor_shapes(folder)
    if not shapes:
        raise ModelError(
            f"model folder {str(folder)!r} has its weights in *.bin files; save it again as"
            " safetensors: model.save_pretrained(folder)"
        )
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is not None:
        own = Quantization.parse(settings, f"{str(folder / 'config.json')!r}")
        _require_no_other(role, quantization, f"{str(folder / 'config.json')!r}")
        quantization = own
    tensors = dict(_stored(folder, shapes))
    text = config.get("text_config")
    config = config | text if isinstance(text, dict) else config
    return Side(
        role=role,
        config=config,
        quantization=quantization,
        layers=_layers(canonical(tensors, config, role)),
        unread=unread,
    )


def _require_no_other(role: str, quantization: Quantization | None, owner: str) -> None:
    """Raise `VerifyInputError` if a trainer that has a quantization_config is given another one."""
    if quantization is not None and role == "trainer":
        raise VerifyInputError(
            f"--config, but {owner} has a quantization_config of its own; omit --config, or compare"
            " the unquantized masters"
        )


def _stored(
    folder: Path,
    shapes: Mapping[str, list[int]],
) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a folder's files. A file is opened for each reading, so that its pages
    do not stay in memory.
    """

    def read(file: Path, name: str) -> torch.Tensor:
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)

    def item(file: Path, name: str, index: int) -> torch.Tensor:
        with safe_open(file, "pt") as opened:
            return opened.get_slice(name)[index]

    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
        for name in names:
            yield (
                name,
                Stored(
                    shape=tuple(shapes[name]),
                    load=partial(read, file, name),
                    part=partial(item, file, name),
                ),
            )


def _in_memory(tensor: torch.Tensor) -> Stored:
    def item(index: int) -> torch.Tensor:
        return tensor[index]

    def load() -> torch.Tensor:
        return tensor

    return Stored(shape=tuple(tensor.shape), load=load, part=item)


def _layers(tensors: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    layers: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = stored
    return layers


def _config_of(source: Any) -> dict[str, Any]:
    """Return config.json's settings of a source that is a folder, or those of a model; else {}."""
    if isinstance(source, str | Path):
        folder = Path(source).expanduser()
        if not (folder / "config.json").is_file():
            return {}
        return text_config(folder)
    reader: Callable[[], Any] | None = getattr(getattr(source, "config", None), "to_dict", None)
    return reader() if reader else {}
