"""Dumps of log-probs with a planted fault, from random models that really sample.

Everything is drawn: family, peakiness, lengths, the fault and its size. Trainer and sampler are the
same transformers model, whose logits the fault changes on one side.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qarl.quant.materialize import materialize
from qarl.quant.schemes import get_scheme

VOCABULARY = 256
PAD = 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
}

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [B, T] → logits [B, T, V]."""


@dataclass
class Drawn:
    """A dump and what was drawn for it."""

    rows: list[dict[str, Any]]
    """Rows of the dump."""
    fault: str
    """Name of the cause that was planted; "" for a clean dump."""
    said: dict[str, Any] = field(default_factory=dict)
    """Drawn values, for messages."""


def draw_model(rng: random.Random) -> tuple[str, nn.Module]:
    """Return a family's name and a random fp32 model of it, with a head that makes it peaky."""
    family = rng.choice(sorted(FAMILIES))
    torch.manual_seed(rng.randrange(2**31))
    model = FAMILIES[family]().eval().requires_grad_(False)
    head: Any = model.lm_head
    head.weight.mul_(rng.uniform(12, 24))
    return family, model


def rounded(model: nn.Module, dtype: torch.dtype) -> Logits:
    """Return the model's logits, computed in a dtype."""
    copy: Any = clone(model).to(dtype)
    return lambda ids: copy(ids).logits.float()


def clone(model: nn.Module) -> Any:
    """Return a copy of a model."""
    copy = type(model)(model.config).eval().requires_grad_(False)  # type: ignore[call-arg]
    copy.load_state_dict(model.state_dict())
    return copy


def quantized(model: nn.Module, scheme: str) -> Logits:
    """Return the logits of the model whose decoder layers' matrices are dequantized codes."""
    copy = clone(model)
    for name, weight in copy.named_parameters():
        if "layers" in name and weight.ndim >= 2 and not name.endswith("mlp.gate.weight"):
            matrices = weight.flatten(0, -2)
            codes = materialize(matrices, get_scheme(scheme), torch.bfloat16)
            weight.copy_(codes.dequantized().view_as(weight))
    return lambda ids: copy(ids).logits.float()


def moved(model: nn.Module, size: float, seed: int) -> Logits:
    """Return the logits of the model after updates that moved each matrix by a relative `size`."""
    copy = clone(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in copy.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(noise * size * weight.std())
    return lambda ids: copy(ids).logits.float()


def cut(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Return logits [B, V] with -inf for tokens outside the top_k and the top_p."""
    ordered, index = logits.sort(-1, descending=True)
    probability = ordered.softmax(-1)
    outside = probability.cumsum(-1) - probability >= top_p
    if top_k:
        outside[:, top_k:] = True
    return logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)


def sample(
    logits: Logits,
    prompts: torch.Tensor,
    tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample `tokens` after prompts [B, P]; return their ids and log-probs, [B, tokens] each."""
    ids = prompts
    chosen = []
    for _ in range(tokens):
        last = cut(logits(ids)[:, -1] / temperature, top_p, top_k)
        token = torch.multinomial(last.softmax(-1), 1)
        chosen.append(last.log_softmax(-1).gather(-1, token))
        ids = torch.cat([ids, token], 1)
    return ids[:, prompts.shape[1] :], torch.cat(chosen, 1)


def score(logits: Logits, prompts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of completions [B, C] after their prompts [B, P], [B, C]."""
    tokens = torch.cat([prompts, ids], 1)
    scores = logits(tokens)[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
    return scores.gather(-1, ids[..., None])[..., 0]


CLEAN = ("equal", "float32-order", "bfloat16", "float16", "updated", "filtered")
FAULTS = (
    "temperature",
    "truncation",
    "shift",
    "stale",
    "padding",
    "prompt",
    "scheme",
    "sequences",
    "not-sampled",
)
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.15, 1.3)


def draw_dump(
    rng: random.Random,
    kind: str,
    completions: int = 40,
    temperatures: Sequence[float] = TEMPERATURES,
) -> Drawn:
    """Return a dump of a random model, with a fault of that kind or a clean one."""
    family, model = draw_model(rng)
    own: Logits = lambda ids: model(ids).logits.float()  # noqa: E731
    torch.manual_seed(rng.randrange(2**31))
    tokens = rng.randrange(20, 44)
    prompts = torch.randint(1, VOCABULARY, (completions, rng.randrange(4, 12)))
    drawn = Drawn([], kind if kind in FAULTS else "", {"family": family, "tokens": tokens})
    rounding = rng.choice([None, torch.bfloat16, torch.float16])
    trainer = own if rounding is None else rounded(model, rounding)
    drawn.said["trainer"] = str(rounding)
    sampling: dict[str, Any] = {}
    if kind == "temperature":
        sampling["temperature"] = rng.choice(temperatures)
    if kind == "truncation":
        sampling = rng.choice([{"top_p": 0.8}, {"top_p": 0.95}, {"top_k": 5}, {"top_k": 20}])
    sampler = own
    if kind == "scheme":
        drawn.said["scheme"] = rng.choice(["w4a16", "w4a16-g64", "w4a16-channel", "nvfp4a16"])
        sampler = quantized(model, drawn.said["scheme"])
    raw = kind == "temperature" and rng.random() < 0.3
    ids, sampled = sample(sampler, prompts, tokens, **sampling)
    scored = score(trainer, prompts, ids)
    if raw:
        scored, sampled = (
            score(lambda tokens: trainer(tokens) / sampling["temperature"], prompts, ids),
            score(own, prompts, ids),
        )
    if kind in ("bfloat16", "float16"):
        scored = score(rounded(model, getattr(torch, kind)), prompts, ids)
    elif kind == "float32-order":
        scored = score(own, prompts, ids)  # sums in another order than one token at a time
    elif kind == "equal":
        scored = sampled.clone()
    drawn.said |= sampling | {"raw": raw}
    records = rng.random() < 0.5 and not raw
    drawn.rows = [
        {
            "prompt_ids": prompt.tolist(),
            "completion_ids": row.tolist(),
            "sampler_logprobs": s.tolist(),
            "trainer_logprobs": t.tolist(),
            "advantage": rng.gauss(0, 1),
            **(sampling if records else {}),
        }
        for prompt, row, s, t in zip(prompts, ids, sampled, scored, strict=True)
    ]
    _finish(rng, kind, drawn, model, trainer, prompts)
    for row in drawn.rows:
        if kind not in ("padding", "prompt", "not-sampled"):
            length = rng.randrange(max(6, tokens // 3), tokens + 1)
            for name in ("completion_ids", "sampler_logprobs", "trainer_logprobs"):
                row[name] = row[name][:length]
    return drawn


def _finish(
    rng: random.Random,
    kind: str,
    drawn: Drawn,
    model: nn.Module,
    trainer: Logits,
    prompts: torch.Tensor,
) -> None:
    """Plant the faults that change rows, and give rows the versions of their kind."""
    rows = drawn.rows
    if kind == "shift":
        lag = rng.choice([1, -1])
        for row in rows:
            values = row["trainer_logprobs"]
            row["trainer_logprobs"] = (
                [*values[1:], 0.0] if lag == 1 else [rng.uniform(-4, 0), *values[:-1]]
            )
    elif kind == "padding":
        for row in rows:
            n = rng.randrange(4, len(row["completion_ids"]))
            pads = len(row["completion_ids"]) - n
            row["completion_ids"][n:] = [PAD] * pads
            ids = torch.tensor([row["completion_ids"]])
            prompt = torch.tensor([row["prompt_ids"]])
            row["trainer_logprobs"][n:] = score(trainer, prompt, ids)[0, n:].tolist()
            row["sampler_logprobs"][n:] = [0.0] * pads
    elif kind == "prompt":
        for row in rows:
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            before = score(trainer, ids[:, :1], ids[:, 1 : len(row["prompt_ids"])])[0].tolist()
            row["trainer_logprobs"] = [0.0, *before, *row["trainer_logprobs"]]
            row["sampler_logprobs"] = [0.0] * len(row["prompt_ids"]) + row["sampler_logprobs"]
            row["completion_ids"] = ids[0].tolist()
    elif kind == "not-sampled":
        own: Logits = lambda ids: model(ids).logits.float()  # noqa: E731
        for row in rows:
            answer = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(4, 13))]
            n = rng.randrange(1, len(row["completion_ids"]))
            row["completion_ids"][n:n] = answer
            prompt = torch.tensor([row["prompt_ids"]])
            ids = torch.tensor([row["completion_ids"]])
            row["trainer_logprobs"] = score(trainer, prompt, ids)[0].tolist()
            row["sampler_logprobs"] = score(own, prompt, ids)[0].tolist()
            row["sampler_logprobs"][n : n + len(answer)] = [0.0] * len(answer)
    elif kind == "sequences":
        chosen = rng.sample(
            range(len(rows)),
            rng.randrange(1, max(2, len(rows) // 5)),
        )
        drawn.said["rows"] = sorted(chosen)
        for n in chosen:
            other = torch.randint(
                1,
                VOCABULARY,
                (1, prompts.shape[1] + rng.randrange(3)),
            )
            ids = torch.tensor([rows[n]["completion_ids"]])
            rows[n]["trainer_logprobs"] = score(trainer, other, ids)[0].tolist()
    elif kind in ("stale", "updated"):
        _plant_age(rng, kind, drawn, model)
    elif rng.random() < 0.5:
        for row in rows:
            row |= {"weight_version": 7, "trainer_version": 7}


def draw_reloads(rng: random.Random, skips: bool) -> Drawn:
    """Return a dump of five weight versions, which say the trainer's version alone.

    skips: Leave one matrix of the sampler as it was in version 0.
    """
    family, model = draw_model(rng)
    rounding = rng.choice([None, torch.bfloat16, torch.float16])
    size = rng.uniform(0.05, 0.15)
    drawn = Drawn([], "stale" if skips else "", {"family": family, "size": size})
    drawn.said["trainer"] = str(rounding)
    trained = clone(model)
    names = [n for n, p in trained.named_parameters() if p.ndim >= 2 and "layers" in n]
    skipped = rng.choice([n for n in names if not n.endswith("mlp.gate.weight")]) if skips else ""
    drawn.said["skipped"] = skipped
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    torch.manual_seed(rng.randrange(2**31))
    for version in range(5):
        engine = clone(trained)
        if skips:
            engine.get_parameter(skipped).copy_(model.get_parameter(skipped))
        trainer = rounded(trained, rounding or torch.float32)
        prompts = torch.randint(1, VOCABULARY, (8, 6))
        ids, sampled = sample(rounded(engine, torch.float32), prompts, 32)
        scored = score(trainer, prompts, ids)
        drawn.rows += [
            {
                "prompt_ids": prompt.tolist(),
                "completion_ids": row.tolist(),
                "sampler_logprobs": s.tolist(),
                "trainer_logprobs": t.tolist(),
                "advantage": rng.gauss(0, 1),
                "trainer_version": version,
            }
            for prompt, row, s, t in zip(prompts, ids, sampled, scored, strict=True)
        ]
        for name in names:
            weight = trained.get_parameter(name)
            weight.add_(torch.randn(weight.shape, generator=generator) * size * weight.std())
    return drawn


def _plant_age(
    rng: random.Random,
    kind: str,
    drawn: Drawn,
    model: nn.Module,
) -> None:
    """Score rows by weights that updates moved since they sampled: by as many as their age, or for
    a clean dump of several versions by none.
    """
    size = rng.uniform(0.01, 0.05)
    seed = rng.randrange(2**31)
    later = {age: moved(model, size * age, seed) for age in range(4)}
    drawn.said["size"] = size
    for row in drawn.rows:
        age = rng.randrange(4)
        version = rng.randrange(4, 9)
        if kind == "stale":
            prompt = torch.tensor([row["prompt_ids"]])
            ids = torch.tensor([row["completion_ids"]])
            row["trainer_logprobs"] = score(later[age], prompt, ids)[0].tolist()
            row |= {"weight_version": version - age, "trainer_version": version}
        else:
            row |= {"weight_version": version, "trainer_version": version}
