"""Write an export as a GGUF file, and prove it by reading it back.

Axes: O output rows, I input columns, E experts.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import (
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    TensorNameMap,
)
from gguf.quants import dequantize, quant_shape_to_byte_shape

from qarl.configs.files import written_aside
from qarl.configs.schemes import SCHEME_SPECS
from qarl.sync.gguf.blocks import block_type, blocks_of
from qarl.sync.gguf.errors import GgufError
from qarl.sync.gguf.exported import Exported, expert_matrices
from qarl.sync.gguf.families import (
    Family,
    architecture_name,
    expert_projections,
    permuted,
    rope_factors,
    tensor_names,
    write_settings,
)
from qarl.sync.gguf.vocabulary import Vocabulary

_PLAIN: Mapping[torch.dtype, GGMLQuantizationType] = {
    torch.bfloat16: GGMLQuantizationType.BF16,
    torch.float16: GGMLQuantizationType.F16,
    torch.float32: GGMLQuantizationType.F32,
}
_FILE_TYPES: Mapping[GGMLQuantizationType, LlamaFileType] = {
    GGMLQuantizationType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    GGMLQuantizationType.MXFP4: LlamaFileType.MOSTLY_MXFP4_MOE,
    GGMLQuantizationType.BF16: LlamaFileType.MOSTLY_BF16,
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.F32: LlamaFileType.ALL_F32,
}
_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp(_shexp)?\.weight")
_ROPE = "rope_freqs.weight"
"""Name of llama3's frequency factors, which a checkpoint computes from its config.json."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file, and where its values come from."""

    name: str
    """Name in the file."""
    kind: GGMLQuantizationType
    """Type in the file."""
    shape: tuple[int, ...]
    """Shape of its values, output rows before input columns."""
    sources: tuple[str, ...]
    """Low-bit layers or plain tensors of the checkpoint: one, or each expert's."""
    heads: int | None = None
    """Heads within which rows change places; None if they do not."""
    offset: float = 0.0
    """Number that is added to each value, in fp32."""

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape of its bytes."""
        return tuple(quant_shape_to_byte_shape(self.shape, self.kind))


@dataclass(frozen=True)
class WrittenGguf:
    """A file that was written and read back."""

    name: str
    """Name of the file: the model's, and the type of most of its matrices."""
    sha256: str
    """Its SHA-256, hexadecimal."""
    size: int
    """Its bytes."""
    kinds: Mapping[str, int]
    """Type of tensors, such as "Q4_0" → how many tensors have it; all were compared."""


def write_gguf(
    exported: Exported,
    family: Family,
    vocabulary: Vocabulary,
    folder: Path,
    name: str,
    about: Mapping[str, str],
) -> WrittenGguf:
    """Write an export as one GGUF file into a folder, and compare every tensor with the export's.

    The file appears complete or not at all. Raises `GgufError` for a tensor that llama.cpp does not
    have, a scale that fp16 does not have, and a file whose tensors differ from the export's.

    name: name of the model, with which the file's begins. about: further keys of the file, such as
    "general.name" → value.
    """
    tensors = list(plan_tensors(exported, family))
    kind = _most(Counter(tensor.kind for tensor in tensors if len(tensor.shape) > 1))
    file = folder / f"{name}-{kind.name}.gguf"
    with written_aside(file) as building:
        writer = GGUFWriter(building, architecture_name(family))
        writer.add_file_type(_FILE_TYPES[kind])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        for key, value in about.items():
            writer.add_string(key, value)
        write_settings(writer, exported.config)
        vocabulary.write(writer)
        for tensor in tensors:
            # a byte dtype says that the shape is one of bytes
            size = int(np.prod(tensor.byte_shape))
            writer.add_tensor_info(
                tensor.name, tensor.byte_shape, np.dtype(np.uint8), size, tensor.kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor_bytes(exported, tensor))
        writer.close()
        counts = compare(exported, tensors, building)
        with building.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        size = building.stat().st_size
    return WrittenGguf(name=file.name, sha256=digest, size=size, kinds=counts)


def _most(kinds: Counter[GGMLQuantizationType]) -> GGMLQuantizationType:
    """Return the low-bit type of most tensors, else the plain one of most."""
    low_bit = {kind: count for kind, count in kinds.items() if kind not in _PLAIN.values()}
    return Counter(low_bit or kinds).most_common(1)[0][0]


def plan_tensors(exported: Exported, family: Family) -> Iterator[GgufTensor]:
    """Yield the tensors of the file in its order. Raises `GgufError` for an unknown tensor."""
    config = exported.config
    names = tensor_names(config, family)
    layers = set(exported.layers)
    plain = [name for name in exported.shapes if name.rpartition(".")[0] not in layers]
    plain += [name for name in exported.shapes if name.endswith(".bias") and name not in plain]
    matrices = [*layers, *(n.removesuffix(".weight") for n in plain if n.endswith(".weight"))]
    experts = expert_matrices(matrices, expert_projections(config))
    stacked = {matrix for members in experts.values() for matrix in members}
    entries = []
    for module, members in experts.items():
        for projection in expert_projections(config):
            each = [matrix for matrix in members if matrix.endswith(f".{projection}")]
            entries.append(_entry(exported, names, f"{module}.{projection}", each, family))
    for layer in layers - stacked:
        entries.append(_entry(exported, names, layer, [layer], family))
    for name in plain:
        if name.removesuffix(".weight") not in stacked:
            entries.append(_plain_entry(exported, names, name, family))
    factors = rope_factors(config)
    if factors is not None:
        entries.append(GgufTensor(_ROPE, GGMLQuantizationType.F32, tuple(factors.shape), ()))
    yield from sorted(entries, key=lambda entry: _natural(entry.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts blk.2 before blk.10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def _entry(
    exported: Exported, names: TensorNameMap, layer: str, matrices: list[str], family: Family
) -> GgufTensor:
    """Return the tensor of a low-bit layer, or of one projection of a layer's experts.

    layer: name that the map knows. matrices: the layer itself, or each expert's matrix in order.
    """
    name = _named(names, f"{layer}.weight", exported)
    layouts = {_layout(exported, matrix) for matrix in matrices}
    if len(layouts) > 1:
        raise GgufError(
            f"the matrices of {layer!r} have different schemes or shapes, and GGUF has all experts"
            " of a layer in one tensor; give them one scheme"
        )
    ((kind, shape),) = layouts
    stack = () if matrices == [layer] else (len(matrices),)
    heads = family.permuted_heads(layer, exported.config)
    return GgufTensor(name, kind, (*stack, *shape), tuple(matrices), heads=heads)


def _plain_entry(
    exported: Exported, names: TensorNameMap, tensor: str, family: Family
) -> GgufTensor:
    """Return a tensor in the compute dtype. Vectors and routers become fp32, which is exact."""
    name = _named(names, tensor, exported)
    shape = exported.shapes[tensor]
    is_router = _ROUTER.fullmatch(name) is not None
    # llama.cpp has a router of one row as a vector
    shape = shape[1:] if is_router and shape[0] == 1 else shape
    fp32 = len(shape) == 1 or is_router
    kind = GGMLQuantizationType.F32 if fp32 else _PLAIN[exported.dtype(tensor)]
    heads = family.permuted_heads(tensor.rpartition(".")[0], exported.config)
    offset = family.norm_offset if tensor.endswith("norm.weight") else 0.0
    return GgufTensor(name, kind, shape, (tensor,), heads=heads, offset=offset)


def _named(names: TensorNameMap, tensor: str, exported: Exported) -> str:
    name = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise GgufError(
            f"{str(exported.folder)!r} has a tensor {tensor!r} that llama.cpp does not have in"
            f" models of type {exported.config.model_type!r}; serve the export with `qarl serve`"
        )
    return name


def _layout(exported: Exported, matrix: str) -> tuple[GGMLQuantizationType, tuple[int, ...]]:
    """Return the type and shape (O, I) of a low-bit or plain matrix."""
    if f"{matrix}.weight_packed" not in exported.shapes:
        name = f"{matrix}.weight"
        return _PLAIN[exported.dtype(name)], exported.shapes[name]
    scheme, shape = exported.layout(matrix)
    kind = block_type(SCHEME_SPECS[scheme.name])
    assert kind is not None
    return kind, shape


def tensor_bytes(exported: Exported, tensor: GgufTensor) -> np.ndarray:
    """Return a tensor's bytes, uint8, in the shape `byte_shape`."""
    if tensor.name == _ROPE:
        factors = rope_factors(exported.config)
        assert factors is not None
        return factors.numpy().view(np.uint8)
    parts = [_source_bytes(exported, source, tensor) for source in tensor.sources]
    return np.ascontiguousarray(np.stack(parts).reshape(tensor.byte_shape))


def _source_bytes(exported: Exported, source: str, tensor: GgufTensor) -> np.ndarray:
    """Return the bytes of one source, uint8 [O, bytes of a row], or [bytes] of a vector."""
    if f"{source}.weight_packed" in exported.shapes:
        blocks = torch.from_numpy(blocks_of(exported.weight(source), source))
    else:
        name = source if source in exported.shapes else f"{source}.weight"
        values = exported.tensor(name)
        if tensor.kind == GGMLQuantizationType.F32:
            values = values.to(torch.float32) + tensor.offset
        blocks = values.contiguous().unsqueeze(-1).view(torch.uint8).flatten(-2)
    return (blocks if tensor.heads is None else _permuted_rows(blocks, tensor)).numpy()


def _permuted_rows(rows: torch.Tensor, tensor: GgufTensor) -> torch.Tensor:
    """Permute the rows of a matrix, or the values of a bias (bytes of fp32)."""
    assert tensor.heads is not None
    if rows.ndim == 1:
        return permuted(rows.view(-1, 4), tensor.heads).flatten()
    return permuted(rows, tensor.heads)


def compare(
    exported: Exported,
    tensors: Sequence[GgufTensor],
    file: Path,
) -> dict[str, int]:
    """Read a file back and compare each tensor's dequantized values with the export's, in fp32.

    Returns type → number of tensors, all of which are equal. Raises `GgufError` otherwise.
    """
    reader = GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    counts: Counter[str] = Counter()
    wrong = sorted({tensor.name for tensor in tensors} ^ stored.keys())
    for tensor in tensors:
        if tensor.name in stored and not wrong:
            read = stored[tensor.name]
            actual = torch.from_numpy(dequantize(read.data, read.tensor_type).copy())
            if not torch.equal(actual, _expected(exported, tensor)):
                wrong.append(tensor.name)
            counts[read.tensor_type.name] += 1
    if wrong:
        raise GgufError(
            f"{str(file)!r}, read back, has {len(wrong)} tensors that differ from the export's, the"
            f" first being {wrong[0]!r}; this is a fault of QaRL, so keep the export and report it"
        )
    return dict(counts)


def _expected(exported: Exported, tensor: GgufTensor) -> torch.Tensor:
    """Return the values that a tensor of the file must have, fp32, from the export alone."""
    if tensor.name == _ROPE:
        factors = rope_factors(exported.config)
        assert factors is not None
        return factors
    values = []
    for source in tensor.sources:
        if f"{source}.weight_packed" in exported.shapes:
            value = exported.weight(source).dequantized()
        else:
            name = source if source in exported.shapes else f"{source}.weight"
            value = exported.tensor(name).to(torch.float32) + tensor.offset
        values.append(value if tensor.heads is None else permuted(value, tensor.heads))
    return torch.stack(values).reshape(tensor.shape)
