"""Checkpoint folders of a trainer and an engine with a planted fault, from random models.

Everything is drawn: family, scheme, dtype of the masters, the fault and the layer it is in.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qarl.quant.checkpoint.plan import make_plan
from qarl.quant.materialize import materialize
from qarl.quant.schemes import get_scheme
from tests.support.drawn_dumps import draw_model

Tensors = dict[str, torch.Tensor]
SCHEMES = ("w4a16-g64", "w4a16", "w8a8", "fp8", "w4a16-channel", "w8a16")
CLEAN = ("masters", "bf16-masters", "wrapped", "fused", "fake-quantized", "codes", "unquantized")
FAULTS = (
    "stale",
    "exchanged",
    "expert-order",
    "layer-order",
    "permuted",
    "transposed",
    "scaled",
    "zeros",
    "not-finite",
    "unrelated",
    "ignore-list",
    "scheme",
    "group-size",
    "protected",
    "tied",
    "missing",
    "settings",
    "scales",
)


@dataclass
class Pair:
    """Two sides and what was drawn for them."""

    trainer: Any
    """Folder or mapping of the trainer."""
    engine: Any
    """Folder of the engine."""
    config: dict[str, Any] | None
    """What the trainer means to quantize; None if it is not said."""
    said: dict[str, Any] = field(default_factory=dict)
    """Drawn values, for messages."""


def masters(
    folder: Path,
    rng: random.Random,
    dtype: torch.dtype,
    family: str = "",
) -> str:
    """Write a random model's checkpoint and return its family."""
    while True:
        drawn, model = draw_model(rng)
        if family in ("", drawn):
            break
    model.to(dtype).save_pretrained(folder)  # type: ignore[operator]
    return drawn


def read(folder: Path) -> Tensors:
    """Return all tensors of a folder with one file."""
    return load_file(folder / "model.safetensors")


def linears(tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Return the layers that multiply by a matrix → (O, I)."""
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and name.endswith(".weight") and "embed_tokens" not in name
    }


def quantization(tensors: Tensors, scheme: str) -> dict[str, Any]:
    """Return the `quantization_config` of a scheme over all layers."""
    config = make_plan(get_scheme(scheme), [], linears(tensors), {}).quantization_config()
    assert config is not None
    return config


def codes(
    tensors: Tensors,
    scheme: str,
    layers: list[str] | None = None,
    scales: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Return tensors with the codes of some layers, or of all that the scheme quantizes, in place
    of their weights; others in bfloat16. scales: dtype of the codes' scales.
    """
    chosen = get_scheme(scheme)
    if layers is None:
        layers = [name for name in linears(tensors) if not chosen.leaves_alone(name)]
    result = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if layer not in layers:
            result[name] = tensor.to(torch.bfloat16)
            continue
        weight = materialize(tensor, chosen, scales)
        result |= {f"{layer}.{leaf}": value for leaf, value in weight.tensors()}
    return result


def write(folder: Path, source: Path, tensors: Tensors, **settings: Any) -> Path:
    """Write a checkpoint with `source`'s config.json, of which some settings are changed."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def draw_pair(folder: Path, rng: random.Random, kind: str) -> Pair:
    """Return a pair with a fault of that kind, or a clean one, written below `folder`."""
    family = rng.choice(["qwen3", "llama", "qwen3-moe"])
    if kind == "expert-order":
        family = "qwen3-moe"
    if kind in ("fused", "exchanged", "group-size") and family == "qwen3-moe":
        family = "llama"
    dtype = torch.bfloat16 if kind == "bf16-masters" or rng.random() < 0.3 else torch.float32
    if kind == "scales":  # those of 16-bit masters may lose nothing in 16 bits
        dtype = torch.float32
    source = folder / "masters"
    masters(source, rng, dtype, family)
    scheme = rng.choice(SCHEMES)
    if kind == "unquantized":
        scheme = "bf16"
    if kind == "group-size":
        scheme = rng.choice(["w4a16-g64", "w4a16"])
    tensors = read(source)
    pair = Pair(
        source,
        None,
        None,
        {"family": family, "scheme": scheme, "dtype": str(dtype)},
    )
    if kind in CLEAN:
        return _clean(folder, pair, tensors, kind, scheme)
    return _PLANTERS.get(kind, _changed)(folder, rng, pair, tensors, kind, scheme)


def _settings(tensors: Tensors, scheme: str) -> dict[str, Any]:
    return {} if scheme == "bf16" else {"quantization_config": quantization(tensors, scheme)}


def _clean(
    folder: Path,
    pair: Pair,
    tensors: Tensors,
    kind: str,
    scheme: str,
) -> Pair:
    source = pair.trainer
    published = codes(tensors, scheme) if scheme != "bf16" else codes(tensors, "w8a8", [])
    settings = _settings(tensors, scheme)
    pair.engine = write(folder / "engine", source, published, **settings)
    if kind == "masters":
        pair.config = settings["quantization_config"]
    elif kind == "wrapped":
        pair.trainer = {f"module._orig_mod.{name}": value for name, value in tensors.items()}
    elif kind == "fused":
        pair.trainer = fused(tensors)
    elif kind == "codes":
        pair.trainer = write(folder / "trainer", source, published, **settings)
    elif kind == "fake-quantized":
        values = dict(tensors)
        for layer in linears(tensors):
            if not get_scheme(scheme).leaves_alone(layer):
                weight = materialize(tensors[f"{layer}.weight"], get_scheme(scheme), torch.bfloat16)
                values[f"{layer}.weight"] = weight.dequantized()
        pair.trainer = write(folder / "trainer", source, values)
    return pair


def fused(tensors: Tensors) -> Tensors:
    """Return tensors with q, k, v and gate, up joined, as engines name them."""
    result = dict(tensors)
    for name in tensors:
        for first, parts, joined in (
            ("q_proj", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("gate_proj", "up_proj"), "gate_up_proj"),
        ):
            if first in name and ".experts." not in name:
                rows = [result.pop(name.replace(first, part)) for part in parts]
                result[name.replace(first, joined)] = torch.cat(rows)
    return result


def _changed(
    folder: Path, rng: random.Random, pair: Pair, tensors: Tensors, kind: str, scheme: str
) -> Pair:
    """Plant a fault into values, of codes made from other values than the trainer's."""
    values = {name: value.clone() for name, value in tensors.items()}
    chosen = get_scheme(scheme)
    layers = [name for name in linears(tensors) if not chosen.leaves_alone(name)]
    blocks = sorted({name.split(".")[2] for name in layers})
    block = f"model.layers.{rng.choice(blocks)}."
    layer = rng.choice([name for name in layers if name.startswith(block)])
    key = f"{layer}.weight"
    if kind == "stale":
        size = rng.choice([0.02, 0.1, 0.3])
        pair.said["size"] = size
        noise = torch.randn(values[key].shape) * size * values[key].float().std()
        values[key] = (values[key] + noise).to(values[key].dtype)
    elif kind == "unrelated":
        values[key] = torch.randn_like(values[key]) * values[key].float().std().to(
            values[key].dtype
        )
    elif kind == "exchanged":
        part, other = rng.choice(
            [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")]
        )
        layer = f"{block}{part}"
        _swap(values, f"{block}{part}.weight", f"{block}{other}.weight")
    elif kind == "expert-order":
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            _swap(
                values, f"{block}mlp.experts.0.{leaf}.weight", f"{block}mlp.experts.2.{leaf}.weight"
            )
        layer = f"{block}mlp.experts.0.gate_proj"
    elif kind == "layer-order":
        for name in [name for name in values if name.startswith("model.layers.0.")]:
            if values[name].ndim == 2:
                _swap(values, name, name.replace("layers.0.", "layers.1."))
        layer = layer.replace("layers.1.", "layers.0.")
    elif kind == "permuted":
        values[key] = values[key][torch.randperm(len(values[key]))]
    elif kind == "transposed":
        layer = f"{block}self_attn.o_proj"
        values[f"{layer}.weight"] = values[f"{layer}.weight"].T.contiguous()
    elif kind == "scaled":
        values[key] = values[key] * 2
    elif kind == "zeros":
        values[key] = values[key] * 0
    elif kind == "missing":
        layer = rng.choice([name for name in layers if name.startswith(block)])
    published = codes(values, scheme)
    if kind == "missing":
        published = {n: v for n, v in published.items() if not n.startswith(f"{layer}.")}
    elif kind == "not-finite":
        published[f"{layer}.weight_scale"][0] = torch.nan
    pair.said["layer"] = layer
    pair.engine = write(folder / "engine", pair.trainer, published, **_settings(tensors, scheme))
    return pair


def _swap(values: Tensors, one: str, other: str) -> None:
    values[one], values[other] = values[other], values[one]


def _listed(
    folder: Path, rng: random.Random, pair: Pair, tensors: Tensors, kind: str, scheme: str
) -> Pair:
    """Plant a fault into which layers are quantized, or how."""
    settings = _settings(tensors, scheme)
    config = settings["quantization_config"]
    published = codes(tensors, scheme)
    chosen = get_scheme(scheme)
    layers = [name for name in linears(tensors) if not chosen.leaves_alone(name)]
    if kind == "scheme":
        other = rng.choice([name for name in SCHEMES if name != scheme])
        pair.said["means"] = other
        pair.config = quantization(tensors, other)
    elif kind == "group-size":
        other = "w4a16" if scheme == "w4a16-g64" else "w4a16-g64"
        settings = _settings(tensors, other)
    elif kind == "ignore-list":
        leaf = rng.choice(["o_proj", "down_proj", "v_proj"])
        left = [name for name in layers if name.endswith(leaf)]
        rest = [name for name in layers if name not in left]
        published = codes(tensors, scheme, rest)
        pair.said["by"] = rng.choice(["substring", "engine"])
        if pair.said["by"] == "substring":
            config["ignore"] = [*config["ignore"], leaf]
        else:
            pair.config = json.loads(json.dumps(config))
            config["ignore"] = [*config["ignore"], rf"re:.*{leaf}$"]
    elif kind == "protected":
        special = rng.choice([n for n in linears(tensors) if chosen.leaves_alone(n)])
        if special == "lm_head":
            targets = config["config_groups"]["group_0"]["targets"]
            config["config_groups"]["group_0"]["targets"] = [*targets, "lm_head"]
        published = codes(tensors, scheme, [*layers, special])
        config["ignore"] = [name for name in config["ignore"] if name != special]
    pair.engine = write(folder / "engine", pair.trainer, published, **settings)
    return pair


def _other_config(
    folder: Path, rng: random.Random, pair: Pair, tensors: Tensors, kind: str, scheme: str
) -> Pair:
    """Plant a fault into settings, the output head, or the dtype of scales."""
    settings = _settings(tensors, scheme)
    published = codes(tensors, scheme)
    if kind == "scales":
        full = codes(tensors, scheme, scales=torch.float32)
        pair.trainer = write(folder / "codes", pair.trainer, full, **settings)
        published = {
            name: value.to(torch.bfloat16) if name.endswith("weight_scale") else value
            for name, value in full.items()
        }
    elif kind == "settings":
        settings |= rng.choice([{"rms_norm_eps": 1e-3}, {"num_key_value_heads": 4}])
    else:
        tied = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
        pair.trainer = write(folder / "tied", pair.trainer, tied, tie_word_embeddings=True)
    pair.engine = write(folder / "engine", folder / "masters", published, **settings)
    return pair


Planter = Callable[[Path, random.Random, Pair, Tensors, str, str], Pair]
_PLANTERS: dict[str, Planter] = {
    **dict.fromkeys(("ignore-list", "scheme", "group-size", "protected"), _listed),
    **dict.fromkeys(("tied", "settings", "scales"), _other_config),
}
