"""The sizes of a decoder, read from its config.json or published, and the bytes of its weights.

Imports no torch. Axes of a weight: O output rows, I input columns.
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
from qarl.quant.checkpoint.check_folder import check_model
from qarl.quant.checkpoint.folder import hub_config, local_folder, own_head, read_config
from qarl.quant.checkpoint.patterns import matching
from qarl.quant.checkpoint.settings import EXPERTS_A_TOKEN, tower_inputs

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by dtype."""

Matrix = tuple[int, int]
"""(O, I)"""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
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
"""Model types whose head and embedding are one tensor unless config.json says otherwise.

Source: transformers' defaults.
"""

_OTHER_NAMES = (
    "ministral",
    "phi3",
    "glm",
    "glm4",
    "hunyuan_v1_dense",
    "mixtral",
    "phimoe",
    "granitemoe",
    "gpt_oss",
    "minimax_m2",
)
"""Model types whose checkpoints have other matrices than `matrices` says: merged ones, or other
names. Those of ministral and hunyuan_v1_dense were not compared.
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
"""Model types whose layers are all as `Shapes` describes them."""


_SAME_LAYERS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Type of a language model beside towers → type of `COUNTED` that has the same layers."""


@dataclass(frozen=True)
class Shapes:
    """The sizes of a decoder whose layers are all alike."""

    hidden: int
    """Columns of the residual stream."""

    layers: int
    """Number of decoder layers."""

    heads: int
    """Number of query heads."""

    kv_heads: int
    """Number of key heads, and of value heads."""

    head_dim: int
    """Columns of one head."""

    intermediate: int
    """Columns of the gated MLP, or of one expert."""

    vocabulary: int
    """Number of tokens of the embedding and the output head."""

    tied: bool
    """Whether embedding and output head are one tensor."""

    experts: int = 0
    """Number of routed experts of a layer; 0 in a dense model."""

    experts_a_token: int = 0
    """Number of experts that a token is routed to; 0 in a dense model."""

    exact: bool = True
    """Whether `matrices` has the names and shapes of the checkpoint's matrices."""

    @property
    def query_columns(self) -> int:
        """Columns of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_columns(self) -> int:
        """Columns of all keys of a token; values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def layer_experts(self) -> int:
        """Parameters of all experts of one layer: gate, up and down of each."""
        return 3 * self.experts * self.intermediate * self.hidden

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest single matrix of a layer, that of one expert in a mixture."""
        matrices = (*self.attention_matrices, *self.mlp_matrices)
        return max(rows * columns for rows, columns in matrices)

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """(O, I) of q, k, v and o of one layer."""
        return (
            (self.query_columns, self.hidden),
            (self.key_columns, self.hidden),
            (self.key_columns, self.hidden),
            (self.hidden, self.query_columns),
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
    def attention(self) -> int:
        """Parameters of the attention matrices of all layers."""
        return self.layers * _elements(self.attention_matrices)

    @property
    def quantized(self) -> int:
        """Parameters of all matrices that a low-bit scheme quantizes."""
        mlp = _elements(self.mlp_matrices) * max(self.experts, 1)
        return self.attention + self.layers * mlp

    @property
    def router(self) -> int:
        """Parameters of all routers, which stay in the compute dtype."""
        return self.layers * self.experts * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the output head; the embedding has as many, or is the same tensor."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters except those of norms and biases."""
        return self.quantized + self.router + self.head * (1 if self.tied else 2)

    def key_value_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token's keys and values in all layers.

        itemsize: bytes of a cached value.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def quantized_bytes(self, scheme: str, itemsize: int) -> int:
        """Return the bytes of all matrices that a low-bit scheme quantizes, as published.

        itemsize: bytes of a value in the compute dtype.
        """
        mlp = self._stored(self.mlp_matrices, scheme, itemsize) * max(self.experts, 1)
        return self.layers * (self._stored(self.attention_matrices, scheme, itemsize) + mlp)

    def _stored(self, matrices: tuple[Matrix, ...], scheme: str, itemsize: int) -> int:
        return sum(SCHEME_SPECS[scheme].weight_bytes(shape, itemsize) for shape in matrices)


def matrices(shapes: Shapes) -> Iterator[tuple[str, Matrix]]:
    """Yield (checkpoint name, (O, I)) of every matrix that can be quantized.

    Names are those of Llama, Qwen and their mixtures (`Shapes.exact`). A rule that names others,
    such as Mixtral's `w1`, matches nothing here.
    """
    for layer in range(shapes.layers):
        prefix = f"model.layers.{layer}"
        for leaf, shape in zip(_ATTENTION, shapes.attention_matrices, strict=True):
            yield f"{prefix}.self_attn.{leaf}", shape
        modules = [f"mlp.experts.{expert}" for expert in range(shapes.experts)] or ["mlp"]
        for module in modules:
            for leaf, shape in zip(_MLP, shapes.mlp_matrices, strict=True):
                yield f"{prefix}.{module}.{leaf}", shape


def schemes_of(
    shapes: Shapes, scheme: str, rules: Sequence[LayerRule]
) -> Iterator[tuple[str, str, Matrix]]:
    """Return (name, scheme's name, (O, I)) of every matrix; the first rule that matches wins."""
    sizes = dict(matrices(shapes))
    schemes = dict.fromkeys(sizes, scheme)
    for rule in reversed(rules):
        schemes |= dict.fromkeys(matching(rule.match, list(sizes)), rule.scheme)
    return ((name, schemes[name], shape) for name, shape in sizes.items())


@cache
def unmatched(shapes: Shapes, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns that match none of the names of `matrices`.

    They may be names of another family than Llama's, or mistyped.
    """
    names = [name for name, _ in matrices(shapes)]
    return tuple(pattern for pattern in patterns if not matching(pattern, names))


@cache
def targeted(shapes: Shapes, patterns: tuple[str, ...]) -> int:
    """Return the sum of rows and columns, O + I, of all matrices that get an adapter.

    All matrices get one if there are no patterns, and all are counted, an upper bound, if
    `unmatched` has any. An expert's gate and up count as one matrix.
    """
    sizes = dict(matrices(shapes))
    named = {name for pattern in patterns for name in matching(pattern, list(sizes))}
    adapted = set(sizes) if not patterns or unmatched(shapes, patterns) else named
    total = 0
    for name, (rows, columns) in sizes.items():
        if name not in adapted or (shapes.experts and name.endswith(".up_proj")):
            continue
        merged = shapes.experts and name.endswith(".gate_proj")
        total += (2 * rows if merged else rows) + columns
    return total


def shapes_of(config: Mapping[str, Any], name: str) -> Shapes:
    """Return the sizes that the fields of a config.json give, of its language model alone.

    name: name of the model, for messages.

    Raises `ConfigError` unless all layers are alike, each with attention whose keys and values
    belong to a group of heads, and with one gated MLP or routed experts.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        # the whole's says whether the head is tied
        tie = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**text, **tie}
    kind = config.get("model_type")
    kind = _SAME_LAYERS.get(str(kind), kind)
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
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    experts = _first(config, ("num_experts", "num_local_experts"))
    if experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ConfigError(
            f"model {name!r}: some of its layers have experts and some have none, which is not"
            " counted"
        )
    expert_columns = config.get("moe_intermediate_size") if experts else None
    return Shapes(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=expert_columns or config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        experts=experts,
        experts_a_token=_first(config, EXPERTS_A_TOKEN) if experts else 0,
        exact=kind not in _OTHER_NAMES,
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of these fields that the config sets, or 0; families name it differently."""
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
"""Published sizes by model name, for predictions without a checkpoint."""

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
"""Sizes of the embedded models.

Their recipes (`qarl.embedded.recipe`) cannot be read without torch, and SmolLM2 may not be
downloaded yet.
"""


def sizes_of(model: str) -> tuple[Shapes, str]:
    """Return the sizes of a model, and their source in words.

    The published sizes of Qwen's models are known. The config.json of any other hub id is taken
    from the hub's cache or downloaded.

    model: as `RunConfig.model`, or a name of `NAMED`.

    Raises `ModelError` if there is no config.json, and `ConfigError` if its architecture is not
    counted (`shapes_of`).
    """
    if model.lower() in NAMED:
        return NAMED[model.lower()], "published sizes"
    if model in EMBEDDED:
        return EMBEDDED[model], "its recipe"
    folder = local_folder(model)
    if folder is not None:
        check_model(folder)
        shapes = shapes_of(read_config(folder), model)
        tied = shapes.tied and not own_head(folder)
        left_out = " and ".join(tower_inputs(folder))
        note = f", without its part for {left_out}" if left_out else ""
        return replace(shapes, tied=tied), f"its config.json{note}"
    published = _published(model)
    return published or (
        shapes_of(read_config(hub_config(model).parent), model),
        "its config.json on the hub",
    )


def counted_parameters(folder: Path) -> int:
    """Return the number of parameters by a folder's config.json, without norms and biases.

    It is 0 if the model's family is not counted.
    """
    with suppress(ConfigError):
        return sizes_of(str(folder))[0].parameters
    return 0


def _published(model: str) -> tuple[Shapes, str] | None:
    """Return the published sizes of a Qwen model, alike for base, instruct and math models."""
    size = model.removeprefix(_PUBLISHER).lower()
    for part in ("-base", "-instruct", "-math"):
        size = size.replace(part, "")
    if not model.startswith(_PUBLISHER) or size not in NAMED:
        return None
    return NAMED[size], "published sizes"
