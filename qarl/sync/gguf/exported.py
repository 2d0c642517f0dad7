"""Read an exported checkpoint folder: its tensors by name, its low-bit weights, its digest."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig

from qarl.configs.schemes import SCHEME_SPECS
from qarl.quant.checkpoint.families import family_of
from qarl.quant.checkpoint.folder import read_config, tensor_shapes, weight_files
from qarl.quant.checkpoint.load import empty_model
from qarl.quant.digest import digested
from qarl.quant.materialize.weight import LowBitWeight
from qarl.quant.schemes import Scheme, describe_activations, describe_weights, scheme_of_args
from qarl.quant.types import LowBitTensor
from qarl.sync.gguf.blocks import block_type, supported_schemes
from qarl.sync.gguf.errors import GgufError

_SUFFIXES = ("weight_packed", "weight", "weight_scale", "weight_shape", "bias")
"""Last parts of tensors' names in the order of the published stream."""
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""safetensors' name of a dtype → torch's."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)$")


@dataclass(frozen=True)
class Exported:
    """An exported checkpoint. Tensors are read from its files when they are asked for."""

    folder: Path
    """Folder of the checkpoint."""
    config: PreTrainedConfig
    """Architecture."""
    schemes: tuple[Scheme, ...]
    """Low-bit schemes that its config.json names; all of them have a GGUF type."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name of each tensor → its shape."""
    readers: Mapping[str, Any] = field(repr=False)
    """Name of each tensor → the open safetensors file that has it."""
    kv_cache: bool = False
    """True if keys and values were in fp8."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored."""
        return self.readers[name].get_tensor(name)

    @property
    def layers(self) -> list[str]:
        """Names of the low-bit matrices, in no particular order."""
        end = ".weight_packed"
        return [name.removesuffix(end) for name in self.shapes if name.endswith(end)]

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype, from its file's header."""
        return _DTYPES[self.readers[name].get_slice(name).get_dtype()]

    def layout(self, layer: str) -> tuple[Scheme, tuple[int, int]]:
        """Return the scheme and shape (O, I) of a low-bit layer, without reading its codes.

        Raises `GgufError` if its tensors fit none of the folder's schemes.
        """
        rows, width = self.shapes[f"{layer}.weight_packed"]
        packed = self.dtype(f"{layer}.weight_packed")
        for scheme in self.schemes:
            codes = SCHEME_SPECS[scheme.name].weights
            assert codes is not None
            columns = width * packed.itemsize * 8 // codes.bits
            groups = columns // (scheme.group_size or columns)
            fits = packed == (torch.int32 if scheme.packs_integers else torch.uint8)
            if fits and self.shapes.get(f"{layer}.weight_scale") == (rows, groups):
                if not scheme.packs_integers:
                    return scheme, (rows, columns)
                if self.tensor(f"{layer}.weight_shape").tolist() == [rows, columns]:
                    return scheme, (rows, columns)
        names = ", ".join(scheme.name for scheme in self.schemes)
        raise GgufError(
            f"layer {layer!r} of {str(self.folder)!r} has {packed} codes {(rows, width)} and scales"
            f" {self.shapes.get(f'{layer}.weight_scale')}, which fit none of its schemes ({names});"
            " export the run again"
        )

    def weight(self, layer: str) -> LowBitWeight:
        """Return the low-bit weight of a layer. Raises what `layout` raises."""
        scheme, shape = self.layout(layer)
        codes, scale = (self.tensor(f"{layer}.weight_{part}") for part in ("packed", "scale"))
        return LowBitWeight(scheme, codes, scale, shape)

    def stream(self) -> Iterator[LowBitTensor]:
        """Yield every tensor in the order in which the learner publishes and exports.

        Files do not keep that order, and digests depend on it. Tensors that the architecture does
        not have come last.
        """
        family = family_of(self.config.model_type)
        checkpoint_name = family.checkpoint_name
        remaining = dict.fromkeys(sorted(self.shapes))
        by_layer: dict[str, list[str]] = {}
        for name in remaining:
            by_layer.setdefault(_layer_of(name), []).append(name)
        experts = expert_matrices(by_layer, family.experts.projections)
        for parameter, _ in empty_model(self.config).named_parameters():
            written = checkpoint_name(parameter)
            layer, _, key = written.rpartition(".")
            module = checkpoint_name(parameter.rpartition(".")[0])
            if module in experts:
                layers = experts[module] if key == family.experts.first_stack else []
                names = [name for each in layers for name in _ordered(by_layer[each])]
            elif key == "weight":
                names = [n for n in _ordered(by_layer.get(layer, [])) if not n.endswith(".bias")]
            else:
                names = [written]
            for name in names:
                if name in remaining:
                    del remaining[name]
                    yield LowBitTensor(name, self.tensor(name))
        for name in remaining:
            yield LowBitTensor(name, self.tensor(name))

    def check_digest(self, expected: str) -> None:
        """Raise `GgufError` if the tensors are not those that were exported.

        expected: digest that qarl.json has.
        """
        actual = digested(self.stream()).hexdigest()
        if actual != expected:
            raise GgufError(
                f"{str(self.folder)!r} was changed after it was exported: its tensors have the"
                f" digest {actual}, and its qarl.json has {expected}; export the run again"
            )


def read_exported(folder: Path) -> Exported:
    """Open an exported checkpoint.

    Raises `ModelError` if it is incomplete, and `GgufError` for a scheme that GGUF does not have.
    """
    tree = read_config(folder)
    config = AutoConfig.from_pretrained(folder)
    written = tree.get("quantization_config")
    shapes = {name: tuple(shape) for name, shape in tensor_shapes(folder).items()}
    readers = {}
    for file in weight_files(folder):
        reader = safe_open(file, "pt")
        readers |= dict.fromkeys(reader.keys(), reader)
    schemes = () if written is None else tuple(_schemes(folder, written))
    cache = bool((written or {}).get("kv_cache_scheme"))
    return Exported(folder, config, schemes, shapes, readers=readers, kv_cache=cache)


def _schemes(folder: Path, written: dict[str, Any]) -> Iterator[Scheme]:
    """Yield the schemes of a quantization_config. Raises `GgufError` if GGUF does not have one."""
    if written.get("quant_method") != "compressed-tensors":
        raise GgufError(
            f"{str(folder)!r} is quantized by {written.get('quant_method')!r}; give a folder that"
            " `qarl export` wrote"
        )
    for group in QuantizationConfig.model_validate(written).config_groups.values():
        assert not isinstance(group, list)
        scheme = scheme_of_args(group.weights, group.input_activations)
        if scheme is None:
            raise GgufError(
                f"{str(folder)!r} has weights {group.weights!r}, which no scheme of QaRL has; give"
                " a folder that `qarl export` wrote"
            )
        if block_type(SCHEME_SPECS[scheme.name]) is None:
            raise GgufError(f"{str(folder)!r} is in scheme {scheme.name!r}: {_why_not(scheme)}")
        yield scheme


def _why_not(scheme: Scheme) -> str:
    """Return why GGUF does not have a scheme, and which it has."""
    if scheme.activations is not None:
        reason = (
            f"its activations are {describe_activations(scheme)}, while llama.cpp rounds"
            " activations to int8 in blocks of 32 columns of its own, so that it would multiply"
            " other numbers"
        )
    else:
        reason = f"no type of GGUF has its weights ({describe_weights(scheme)}) exactly"
    return (
        f"{reason}. A GGUF file has {', '.join(supported_schemes())} and bf16; serve this one with"
        " `qarl serve`"
    )


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def _ordered(names: list[str]) -> list[str]:
    """Return a layer's tensors in the stream's order."""
    return sorted(names, key=lambda name: _SUFFIXES.index(name.rpartition(".")[2]))


def expert_matrices(layers: Iterable[str], projections: tuple[str, ...]) -> dict[str, list[str]]:
    """Return each module of experts → names of its matrices: by expert, then gate, up and down.

    layers: names among which the matrices are. projections: see `ExpertLayout`.
    """
    modules: dict[str, list[tuple[int, int, str]]] = {}
    for layer in layers:
        match = _EXPERT.match(layer)
        if match and match[3] in projections:
            row = (int(match[2]), projections.index(match[3]), layer)
            modules.setdefault(match[1], []).append(row)
    return {module: [layer for *_, layer in sorted(rows)] for module, rows in modules.items()}
