"""A learner step of a real model's shape, counted over its first layers and continued to all.

Layers of a decoder are alike, so what each adds is the same: two layers' count less one's. `measure` counts three as
well, and fails where they say otherwise.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.bench.launches.gpu import Products, stand_in
from qarl.bench.launches.tally import Tally
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.learner import Learner
from qarl.quant.kernels import flash_attention
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.report.tables import PlainTable
from qarl.rollout.types import Completion, Group, Prompt

_SHARED = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {
        **_SHARED, "model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_SHARED, "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}  # fmt: skip
"""From their config.json."""

UPDATES, SEQUENCES, PROMPT, ANSWERS = 2, 128, 64, range(129, 257)
"""Mini-batches of one micro-batch each; answers of as many lengths as there are."""

TOKENS = SEQUENCES * PROMPT + sum(ANSWERS)


@dataclass(frozen=True)
class Count:
    """launches: kernels. waits: of the host for the device. bytes: read and written on the device."""

    launches: int
    waits: int
    bytes: int

    def __sub__(self, other: "Count") -> "Count":
        return Count(self.launches - other.launches, self.waits - other.waits, self.bytes - other.bytes)

    def plus(self, other: "Count", times: int) -> "Count":
        """This and so many of another."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Count(*(one + times * two for one, two in pairs))


@dataclass(frozen=True)
class Launches:
    """step: of a whole step of `UPDATES` updates. layer: what each decoder layer but the first adds to it. compiled:
    whether with `learner.compile`."""

    model: str
    scheme: str
    compiled: bool
    step: Count
    layer: Count


def measure(models: Sequence[str], schemes: Sequence[str]) -> list[Launches]:
    """Rows by model, scheme, and without and with `learner.compile`. Raises `SchemeError` for a
    scheme that is not known, before anything is counted."""
    for scheme in schemes:
        get_scheme(scheme)
    cases = [(m, s, compiles) for m in models for s in schemes for compiles in (False, True)]
    return [count_launches(MODELS[model], model, scheme, compiles) for model, scheme, compiles in cases]


def count_launches(config: dict[str, Any], model: str, scheme: str, compiles: bool) -> Launches:
    """config: fields of its config.json."""
    one, two, three = (count_step(config, layers, scheme, compiles) for layers in (1, 2, 3))
    layer = two - one
    assert three - two == layer, f"{model}: a layer adds {layer}, and another {three - two}"
    step = one.plus(layer, config["num_hidden_layers"] - 1)
    return Launches(model=model, scheme=scheme, compiled=compiles, step=step, layer=layer)


def count_step(config: dict[str, Any], layers: int, scheme: str, compiles: bool) -> Count:
    """Of the first `layers` decoder layers, embedding and head; the step is not a learner's first."""
    tally = Tally()
    flash_attention._starts.cache_clear()  # of counts before, which would lack them here
    with stand_in(tally), tally:
        learner = _learner({**config, "num_hidden_layers": layers}, scheme, compiles, tally)
        batch = _batch()
        learner.learn(batch, 0)  # makes gradients' and moments' tensors
        tally.reset()
        stats = learner.learn(batch, 1)
        assert stats.updates == UPDATES
        return Count(tally.launches, tally.waits, tally.bytes)


def _learner(config: dict[str, Any], scheme: str, compiles: bool, tally: Tally) -> Learner:
    settings = {
        "optimizer": {"name": "muon"},
        "mini_batches": UPDATES,
        "micro_batch_tokens": TOKENS,
        "diagnostics_every": 0,
        "gradient_checkpointing": True,
        "compile": compiles,
    }
    with torch.device("meta"):
        masters = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model = LowBitModel(masters, get_scheme(scheme), LayerContext(torch.bfloat16, "reference"))
    model.multiply_with(Products(tally))
    return Learner(model, LearnerConfig.model_validate(settings))


def _batch() -> Batch:
    completions = [
        Completion(token_ids=(1,) * n, logprobs=(-1.0,) * n, text="", weight_version=0, finish_reason="stop")
        for n in ANSWERS
    ]
    pairs = zip(completions[::2], completions[1::2], strict=True)
    return make_batch([Group(Prompt("", "", (1,) * PROMPT), pair, (0.0, 1.0)) for pair in pairs], 0)


def table(rows: Sequence[Launches]) -> PlainTable:
    """For people."""
    figures = ("launches", "waits", "GB", "a layer's", "its waits", "its GB")
    shown = PlainTable(
        "model", "scheme", "compile", *figures, figures=figures,
        title=f"a learner step on a GPU: {UPDATES} updates over {TOKENS:,} tokens",
    )  # fmt: skip
    for row in rows:
        counts = [
            text
            for count in (row.step, row.layer)
            for text in (f"{count.launches:,}", f"{count.waits:,}", f"{count.bytes / 1e9:,.1f}")
        ]
        shown.add_row(row.model, row.scheme, "on" if row.compiled else "off", *counts)
    return shown


def as_data(rows: Sequence[Launches]) -> list[dict[str, Any]]:
    """JSON-ready."""
    return [dataclasses.asdict(row) for row in rows]
