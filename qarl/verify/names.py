"""Names of tensors: wrappers of frameworks are stripped, fused tensors are split, and names of
other layouts are refused.

Axes: E experts, O output rows, I input columns, F rows of the experts' gate.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qarl.configs.words import few
from qarl.verify.findings import VerifyInputError

if TYPE_CHECKING:
    import torch

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
_SEGMENTS = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)
_PREFIXES = ("module.", "base_model.model.")
_TEXT_MODEL = (
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
_DERIVED = re.compile(r".*(rotary_emb\.\w+|masked_bias|attn\.[kvq]_scale|_float8_\w+)$")
"""Buffers that are computed, and scales of a cache."""
_REFUSED = (
    (
        re.compile(r"(^|\.)_?flat_param"),
        "are FSDP's flattened parameters, of which nothing says where a layer begins; gather them"
        " first: FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT), or FSDP2's"
        " get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
    ),
    (
        re.compile(r"(^|\.)(linear_qkv|linear_fc[12]|linear_proj|word_embeddings|output_layer)\."),
        "are Megatron's; missing is the mapping linear_qkv → q_proj, k_proj, v_proj (interleaved by"
        " query group), linear_proj → o_proj, linear_fc1 → gate_proj, up_proj, linear_fc2 →"
        " down_proj, word_embeddings → embed_tokens: convert to a transformers checkpoint first",
    ),
    (
        re.compile(r"\.lora_[AB]\b|\.lora_embedding_"),
        "are LoRA adapters beside their base; merge them first (merge_and_unload)",
    ),
    (
        re.compile(r"\.(qweight|qzeros|absmax|quant_map|weight_scale_inv)$"),
        "are codes of another format than compressed-tensors; known is compressed-tensors alone, so"
        " convert the checkpoint, or compare the dequantized one",
    ),
)
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_LINEAR = re.compile(r"(.+)\.(qkv_proj|gate_up_proj)\.(\w+)$")
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj|w13_weight|w2_weight)$")


@dataclass(frozen=True)
class Stored:
    """One tensor of a side, which is read when it is wanted."""

    shape: tuple[int, ...]
    """Its shape."""
    load: Callable[[], "torch.Tensor"]
    """Read it."""
    part: Callable[[int], "torch.Tensor"]
    """Read one item of its first axis."""


def canonical(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], side: str
) -> dict[str, Stored]:
    """Return tensors by transformers' names, one layer each.

    Args:
        tensors: by the side's own names.
        config: of the model, config.json's settings; {} if unknown.
        side: "trainer" or "engine", for messages.

    Raises:
        VerifyInputError: names are of a layout that cannot be read, two tensors have the same
            name, or a fused one cannot be split.
    """
    for pattern, reason in _REFUSED:
        names = [name for name in tensors if pattern.search(name)]
        if names:
            raise VerifyInputError(f"the {side}'s tensors {few(names)} {reason}")
    result: dict[str, Stored] = {}
    origin: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = stripped(name)
        if _DERIVED.match(plain):
            continue
        for part_name, part in _parts(plain, tensor, config, side):
            if part_name in result:
                raise VerifyInputError(
                    f"the {side}'s tensors {origin[part_name]!r} and {name!r} are both"
                    f" {part_name!r}; give one of them"
                )
            result[part_name] = part
            origin[part_name] = name
    return result


def stripped(name: str) -> str:
    """Return a name without what frameworks wrap around it."""
    name = _SEGMENTS.sub("", name)
    changed = True
    while changed:
        changed = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                changed = True
    for wrapped, plain in _TEXT_MODEL:
        if name.startswith(wrapped):
            return plain + name.removeprefix(wrapped)
    return name


def _parts(
    name: str, tensor: Stored, config: Mapping[str, Any], side: str
) -> Iterator[tuple[str, Stored]]:
    """Yield a tensor by its own name, or a fused one's parts by theirs."""
    linear = _LINEAR.match(name)
    stack = _STACK.match(name)
    if linear:
        shares = _shares(linear[2], tensor, config, name, side)
        yield from _rows(f"{linear[1]}.{{}}.{linear[3]}", shares, tensor, linear[3], name, side)
    elif stack and len(tensor.shape) == 3:
        yield from _experts(stack[1], stack[2], tensor, config)
    else:
        yield name, tensor


def _shares(
    fused: str, tensor: Stored, config: Mapping[str, Any], name: str, side: str
) -> dict[str, int]:
    """Return the rows of each layer in a fused one, up to a common factor."""
    if fused == "gate_up_proj":
        return dict.fromkeys(_GATE_UP, 1)
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        raise VerifyInputError(
            f"the {side}'s {name!r} {list(tensor.shape)} is fused, and num_attention_heads is"
            " unknown; give a folder with config.json on one side, or q_proj, k_proj and v_proj"
        )
    groups = config.get("num_key_value_heads") or heads
    return dict(zip(_QKV, (heads, groups, groups), strict=True))


def _rows(
    pattern: str,
    shares: Mapping[str, int],
    tensor: Stored,
    suffix: str,
    name: str,
    side: str,
) -> Iterator[tuple[str, Stored]]:
    """Yield the rows of a fused tensor that belong to each layer."""
    import torch

    total = sum(shares.values())
    begin = 0
    for part, share in shares.items():
        key = pattern.format(part)
        if suffix == "weight_shape":

            def shape(share: int = share) -> torch.Tensor:
                full = tensor.load()
                return torch.stack([full[0] * share // total, full[1]])

            yield key, Stored((2,), shape, _no_part)
            continue
        if not tensor.shape or tensor.shape[0] == 1:  # one scale of the tensor
            yield key, tensor
            continue
        if tensor.shape[0] % total:
            raise VerifyInputError(
                f"the {side}'s {name!r} has {tensor.shape[0]} rows, which do not divide into"
                f" {total} equal parts for {', '.join(shares)}; give them unfused"
            )
        end = begin + tensor.shape[0] // total * share

        def rows(begin: int = begin, end: int = end) -> torch.Tensor:
            return tensor.load()[begin:end]

        yield key, Stored((end - begin, *tensor.shape[1:]), rows, _no_part)
        begin = end


def _experts(
    experts: str, leaf: str, tensor: Stored, config: Mapping[str, Any]
) -> Iterator[tuple[str, Stored]]:
    """Yield the matrices [O, I] of a stack of experts.

    A stack is [E, O, I], or [E, I, O] where its last axis is not the model's width as it should be.
    """
    hidden = config.get("hidden_size")
    up = leaf in ("gate_up_proj", "w13_weight")
    rows, columns = tensor.shape[1:]
    turned = up and columns != hidden and rows == hidden
    turned |= not up and rows != hidden and columns == hidden
    rows, columns = (columns, rows) if turned else (rows, columns)
    names = _GATE_UP if up else ("down_proj",)
    height = rows // len(names)
    for expert in range(tensor.shape[0]):
        for n, name in enumerate(names):

            def matrix(expert: int = expert, n: int = n) -> "torch.Tensor":
                full = tensor.part(expert)
                return (full.T if turned else full)[n * height : (n + 1) * height]

            yield f"{experts}.{expert}.{name}.weight", Stored((height, columns), matrix, _no_part)


def _no_part(index: int) -> "torch.Tensor":
    raise AssertionError("a part has no parts")
