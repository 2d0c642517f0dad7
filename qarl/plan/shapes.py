"""A decoder's sizes, as its config.json has them, and the bytes of its weights. Imports neither torch nor transformers.

Axes of a weight: O output rows, I input columns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.schemes import SCHEME_SPECS

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Shapes:
    """intermediate: of the gated MLP, or of one expert. experts: routed ones a layer, 0 in a dense model;
    experts_a_token: those a token is sent to."""

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
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """(O, I) of q, k, v and o of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (queries, self.hidden), (keys, self.hidden), (keys, self.hidden), (self.hidden, queries)

    @property
    def mlp_matrices(self) -> tuple[tuple[int, int], ...]:
        """(O, I) of gate, up and down of one layer, or of one expert."""
        return (self.intermediate, self.hidden), (self.intermediate, self.hidden), (self.hidden, self.intermediate)

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
        """Of one token's keys and values in all layers. itemsize: of the compute dtype, as below."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def quantized_bytes(self, scheme: str, itemsize: int) -> int:
        """Of the matrices that a low-bit scheme quantizes, as published."""
        mlp = self._stored(self.mlp_matrices, scheme, itemsize) * max(self.experts, 1)
        return self.layers * (self._stored(self.attention_matrices, scheme, itemsize) + mlp)

    def _stored(self, matrices: tuple[tuple[int, int], ...], scheme: str, itemsize: int) -> int:
        return sum(SCHEME_SPECS[scheme].weight_bytes(shape, itemsize) for shape in matrices)


def shapes_of(config: Mapping[str, Any], name: str) -> Shapes:
    """Of a config.json's fields. name: the model's, for messages.

    Raises `ConfigError` for a decoder that is not the usual one: every layer alike, attention with keys and values a
    head group, and one gated MLP or routed experts.
    """
    missing = [field for field in _NEEDED if not config.get(field)]
    if missing:
        raise ConfigError(f"model {name!r}: its config.json has no {', '.join(missing)}; its sizes cannot be counted")
    odd = next(_unusual(config), "")
    if odd:
        raise ConfigError(f"model {name!r}: {odd}, which is not counted here; give a model whose layers are all alike")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    experts = _experts(config)
    return Shapes(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=(config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_a_token=config["num_experts_per_tok"] if experts else 0,
    )


def _experts(config: Mapping[str, Any]) -> int:
    return config.get("num_experts") or config.get("num_local_experts") or 0


def _unusual(config: Mapping[str, Any]) -> Iterator[str]:
    """What a config.json says that `Shapes` has no place for."""
    if config.get("kv_lora_rank"):
        yield f"it has latent attention (kv_lora_rank {config['kv_lora_rank']})"
    shared = config.get("shared_expert_intermediate_size") or config.get("n_shared_experts")
    if shared:
        yield f"it has a shared expert beside the routed ones ({shared})"
    if _experts(config) and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        yield "some of its layers have experts and some have none"


def _elements(matrices: tuple[tuple[int, int], ...]) -> int:
    return sum(rows * columns for rows, columns in matrices)


def _named(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int = 151936,
    tied: bool = False, experts: int = 0,
) -> Shapes:  # fmt: skip
    """Qwen2.5 and Qwen3: heads of 128, and 8 experts a token where there are any."""
    return Shapes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=tied,
        experts=experts,
        experts_a_token=8 if experts else 0,
    )


NAMED = {
    "qwen2.5-1.5b": _named(1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-7b": _named(3584, 28, 28, 4, 18944, vocabulary=152064),
    "qwen3-0.6b": _named(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _named(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4b": _named(2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8b": _named(4096, 36, 32, 8, 12288),
    "qwen3-14b": _named(5120, 40, 40, 8, 17408),
    "qwen3-32b": _named(5120, 64, 64, 8, 25600),
    "qwen3-30b-a3b": _named(2048, 48, 32, 4, 768, experts=128),
    "qwen3-235b-a22b": _named(4096, 94, 64, 4, 1536, experts=128),
}
"""Published sizes by name, for predictions without a checkpoint at hand."""

_TINY = Shapes(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocabulary=512, tied=True)
_TINY_MOE = replace(_TINY, intermediate=128, experts=8, experts_a_token=2)
EMBEDDED = {
    "tiny-qwen3": _TINY,
    "tiny-qwen3-long": _TINY,
    "tiny-qwen3-moe": _TINY_MOE,
    "tiny-qwen3-moe-long": _TINY_MOE,
}
"""The embedded policies', whose recipes (`qarl.embedded.recipe`) take torch to read."""
