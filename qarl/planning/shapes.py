"""A decoder's sizes, of its config.json or as published, and the bytes of its weights. Imports no
torch.

Axes of a weight: O output rows, I input columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import LayerRule
from qarl.configs.schemes import SCHEME_SPECS
from qarl.quant.checkpoint.folder import (
    EXPERTS_A_TOKEN,
    check_model,
    hub_config,
    local_folder,
    read_config,
)
from qarl.quant.checkpoint.patterns import matching

Matrix = tuple[int, int]
"""(O, I)"""

_ATTENTION, _MLP = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
)
_PUBLISHER = "Qwen/"
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_TIED = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "ernie4_5",
    "cohere",
    "cohere2",
    "smollm3",
    "vaultgemma",
)
"""Model types whose head is the embeddings where config.json does not say so: transformers'
defaults.
"""
COUNTED = (
    "llama",
    "mistral",
    "ministral",
    "ministral3",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "phi3",
    "glm",
    "glm4",
    "exaone4",
    "ernie4_5",
    "cohere",
    "cohere2",
    "smollm3",
    "olmo",
    "olmo2",
    "olmo3",
    "stablelm",
    "seed_oss",
    "helium",
    "hunyuan_v1_dense",
    "cwm",
    "vaultgemma",
    "bitnet",
    "qwen3_moe",
    "mixtral",
    "phimoe",
    "olmoe",
    "flex_olmo",
    "granitemoe",
    "gpt_oss",
    "minimax_m2",
)
"""Model types that have `Shapes`' layers and no others."""


@dataclass(frozen=True)
class Shapes:
    """intermediate: of the gated MLP, or of one expert. experts: routed ones a layer, 0 in a dense
    model; experts_a_token: those a token is sent to.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_a_token: int = 0

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """(O, I) of q, k, v and o of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (queries, self.hidden),
            (keys, self.hidden),
            (keys, self.hidden),
            (self.hidden, queries),
        )

    @property
    def mlp_matrices(self) -> tuple[Matrix, ...]:
        """(O, I) of gate, up and down of one layer, or of one expert."""
        return (
            (self.intermediate, self.hidden),
            (self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )

    @property
    def quantized(self) -> int:
        """Parameters of all matrices that a low-bit scheme quantizes."""
        mlp = _elements(self.mlp_matrices) * max(self.experts, 1)
        return self.layers * (_elements(self.attention_matrices) + mlp)

    @property
    def router(self) -> int:
        """Parameters of all routers, which stay in the compute dtype."""
        return self.layers * self.experts * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the output head, and of the embedding; one tensor where they are tied."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All but norms and biases."""
        return self.quantized + self.router + self.head * (1 if self.tied else 2)

    def key_value_bytes(self, itemsize: int) -> int:
        """Of one token's keys and values in all layers. itemsize: of the compute dtype, as
        below.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def quantized_bytes(self, scheme: str, itemsize: int) -> int:
        """Of the matrices that a low-bit scheme quantizes, as published."""
        mlp = self._stored(self.mlp_matrices, scheme, itemsize) * max(self.experts, 1)
        return self.layers * (self._stored(self.attention_matrices, scheme, itemsize) + mlp)

    def _stored(self, matrices: tuple[Matrix, ...], scheme: str, itemsize: int) -> int:
        return sum(SCHEME_SPECS[scheme].weight_bytes(shape, itemsize) for shape in matrices)


def matrices(shapes: Shapes) -> Iterator[tuple[str, Matrix]]:
    """(checkpoint name, (O, I)) of every matrix that can be quantized. Names are those of Llama,
    Qwen and their mixtures; a rule that names others (Mixtral's `w1`) counts as none.
    """
    for layer in range(shapes.layers):
        place = f"model.layers.{layer}"
        for leaf, shape in zip(_ATTENTION, shapes.attention_matrices, strict=True):
            yield f"{place}.self_attn.{leaf}", shape
        modules = [f"mlp.experts.{expert}" for expert in range(shapes.experts)] or ["mlp"]
        for module in modules:
            for leaf, shape in zip(_MLP, shapes.mlp_matrices, strict=True):
                yield f"{place}.{module}.{leaf}", shape


def schemes_of(
    shapes: Shapes, scheme: str, rules: Sequence[LayerRule]
) -> Iterator[tuple[str, Matrix]]:
    """(scheme's name, (O, I)) of every matrix; the first rule that matches wins."""
    sizes = dict(matrices(shapes))
    taken = dict.fromkeys(sizes, scheme)
    for rule in reversed(rules):
        taken |= dict.fromkeys(matching(rule.match, list(sizes)), rule.scheme)
    return ((taken[name], shape) for name, shape in sizes.items())


@cache
def targeted(shapes: Shapes, patterns: tuple[str, ...]) -> int:
    """Rows and columns, added up, of the matrices that get an adapter: all without patterns, or
    where these are names of another family than Llama's. An expert's gate and up count as one
    matrix.
    """
    sizes, total = dict(matrices(shapes)), 0
    chosen = {name for pattern in patterns for name in matching(pattern, list(sizes))} or set(sizes)
    for name, (rows, columns) in sizes.items():
        if name in chosen and not (shapes.experts and name.endswith(".up_proj")):
            merged = shapes.experts and name.endswith(".gate_proj")
            total += (2 * rows if merged else rows) + columns
    return total


def shapes_of(config: Mapping[str, Any], name: str) -> Shapes:
    """Of a config.json's fields. name: the model's, for messages.

    Raises `ConfigError` for a decoder that is not the usual one: every layer alike, attention with
    keys and values a head group, and one gated MLP or routed experts.
    """
    kind = config.get("model_type")
    if kind not in COUNTED:
        known = f"none of the {len(COUNTED)} whose sizes are counted (llama, qwen3, …)"
        raise ConfigError(
            f"model {name!r}: model_type {kind!r} is {known}; a run of it starts without a plan"
        )
    missing = [field for field in _NEEDED if not config.get(field)]
    if missing:
        raise ConfigError(
            f"model {name!r}: its config.json has no {', '.join(missing)}; its sizes cannot be"
            " counted"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    experts = _first(config, ("num_experts", "num_local_experts"))
    if experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ConfigError(
            f"model {name!r}: some of its layers have experts and some have none, which is not"
            " counted"
        )
    return Shapes(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=(config.get("moe_intermediate_size") if experts else None)
        or config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        experts=experts,
        experts_a_token=_first(config, EXPERTS_A_TOKEN) if experts else 0,
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Of what families call differently; 0 where it is nowhere."""
    return next((config[name] for name in names if config.get(name)), 0)


def _elements(matrices: tuple[Matrix, ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


_qwen = partial(Shapes, head_dim=128, vocabulary=151936, tied=False)
NAMED = {
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, intermediate=8960, tied=True),
    "qwen2.5-7b": _qwen(3584, 28, 28, 4, intermediate=18944, vocabulary=152064),
    "qwen3-0.6b": _qwen(1024, 28, 16, 8, intermediate=3072, tied=True),
    "qwen3-1.7b": _qwen(2048, 28, 16, 8, intermediate=6144, tied=True),
    "qwen3-4b": _qwen(2560, 36, 32, 8, intermediate=9728, tied=True),
    "qwen3-8b": _qwen(4096, 36, 32, 8, intermediate=12288),
    "qwen3-14b": _qwen(5120, 40, 40, 8, intermediate=17408),
    "qwen3-32b": _qwen(5120, 64, 64, 8, intermediate=25600),
    "qwen3-30b-a3b": _qwen(2048, 48, 32, 4, intermediate=768, experts=128, experts_a_token=8),
    "qwen3-235b-a22b": _qwen(4096, 94, 64, 4, intermediate=1536, experts=128, experts_a_token=8),
}
"""Published sizes by name, for predictions without a checkpoint at hand."""

_TINY = Shapes(
    hidden=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=256,
    vocabulary=512,
    tied=True,
)
_TINY_MOE = replace(_TINY, intermediate=128, experts=8, experts_a_token=2)
EMBEDDED = {
    **dict.fromkeys(("tiny-qwen3", "tiny-qwen3-long"), _TINY),
    **dict.fromkeys(("tiny-qwen3-moe", "tiny-qwen3-moe-long"), _TINY_MOE),
    "tiny-qwen3-tools": _TINY,
    "smollm2-135m": Shapes(
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocabulary=49152,
        tied=True,
    ),
}
"""The embedded models', whose recipes (`qarl.embedded.recipe`) take torch to read, or which are yet
to download.
"""


def sizes_of(model: str) -> tuple[Shapes, str]:
    """Sizes, and where they come from in words. model: as `RunConfig.model`, or a name of `NAMED`.

    A hub id's config.json is taken from the hub's cache or downloaded; the published sizes of
    Qwen's models are known. Raises `ModelError` where there is no config.json, and `ConfigError`
    for one that is not counted (`shapes_of`).
    """
    if model.lower() in NAMED:
        return NAMED[model.lower()], "published sizes"
    if model in EMBEDDED:
        return EMBEDDED[model], "its recipe"
    folder = local_folder(model)
    if folder is not None:
        check_model(folder)
        return shapes_of(read_config(folder), model), "its config.json"
    published = _published(model)
    return published or (
        shapes_of(read_config(hub_config(model).parent), model),
        "its config.json on the hub",
    )


def counted_parameters(folder: Path) -> int:
    """Of a model's folder by its config.json, without norms and biases; 0 for a family that is not
    counted.
    """
    with suppress(ConfigError):
        return sizes_of(str(folder))[0].parameters
    return 0


def _published(model: str) -> tuple[Shapes, str] | None:
    """Base, instruct and math models of a size are alike."""
    size = model.removeprefix(_PUBLISHER).lower()
    for part in ("-base", "-instruct", "-math"):
        size = size.replace(part, "")
    return (
        (NAMED[size], "published sizes") if model.startswith(_PUBLISHER) and size in NAMED else None
    )
