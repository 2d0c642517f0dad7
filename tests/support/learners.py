"""Learners on a tiny random model, batches for them, and comparisons of two learners."""

import itertools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.learn_stats import LearnStats
from qarl.learner.learner import Learner
from qarl.learner.logprobs import token_logprobs
from qarl.learner.optim.loss_scale import LossScale
from qarl.learner.row_logprobs import RowLogprobs
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.rollout.types import Completion, Group, Prompt
from tests.support.models import SIZES, VOCABULARY, collected_gradients, low_bit
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.tensors import seeded

PROMPTS = 6
SAMPLES = 4
Tensors = dict[str, torch.Tensor]


def random_model(tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a model of two layers with weights large enough that logits are far from uniform."""
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.12 if parameter.ndim > 1 else 1 + 0.3 * noise)
    return model.eval()


def make_learner(
    scheme="w4a16",
    dtype=torch.bfloat16,
    seed=0,
    operators="auto",
    reference=None,
    temperature=1.0,
    **config: Any,
) -> Learner:
    """Return a learner on the tiny model. config: the learner's options, and `scale`, the initial
    loss scale of float16. reference: the model of its KL penalty.
    """
    scale = float(config.pop("scale", 2**16))
    aligned = config.get("aligned", True)
    model = low_bit(random_model(seed=seed), scheme, dtype, operators=operators, aligned=aligned)
    optimizer = {"lr": 1e-3, **config.pop("optimizer", {})}
    settings = {
        "mini_batches": 2,
        "diagnostics_every": 0,
        "optimizer": optimizer,
        **config,
    }
    learner = Learner(
        model,
        LearnerConfig.model_validate(settings),
        reference,
        temperature=temperature,
    )
    learner.loss_scale = LossScale(learner.loss_scale.active, scale)
    return learner


def make_groups(seed: int = 0) -> list[Group]:
    """Return groups with prompts of 1–7 tokens, responses of 1–12 tokens and uneven rewards.

    The rewards of the last group are equal, so it teaches nothing.
    """
    generator = seeded(seed)

    def integers(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (count,), generator=generator).tolist())

    groups = []
    for p in range(PROMPTS):
        completions = []
        for _ in range(SAMPLES):
            n = integers(1, 13, 1)[0]
            logprobs = torch.rand(n, generator=generator).mul(-14).tolist()
            completions.append(
                Completion(integers(0, VOCABULARY, n), tuple(logprobs), "", 0, "stop")
            )
        rewards = (
            (1.0,) * SAMPLES
            if p == PROMPTS - 1
            else (1.0, *map(float, integers(0, 2, SAMPLES - 2)), 0.0)
        )
        prompt = Prompt(
            str(p),
            "",
            integers(0, VOCABULARY, integers(1, 8, 1)[0]),
        )
        groups.append(Group(prompt, tuple(completions), rewards))
    return groups


def batch_of(seed: int = 0) -> Batch:
    return make_batch(make_groups(seed), pad_token=VOCABULARY - 1)


def logprobs_of(learner: Learner, batch: Batch) -> RowLogprobs:
    """Return the log-probs of the present policy."""
    rows = RowLogprobs(batch)
    learner.scorer.fill(rows, torch.arange(len(batch.tokens)), learner.model)
    return rows


def masters_of(learner: Learner) -> Tensors:
    return {name: p.detach().clone() for name, p in learner.model.masters.items()}


def whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the full tensors of shared ones. All processes call this together."""
    whole = {}
    for name, value in state.items():
        if isinstance(value, dict):
            whole[name] = whole_state(value)
        else:
            whole[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return whole


def all_equal(a: Tensors, b: Tensors) -> bool:
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[name], b[name]) for name in a)


def distances(
    start: Tensors, expected: Tensors, found: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far each weight of the masters moved and how far the two final values differ."""
    assert found.keys() == expected.keys() == start.keys()

    def difference(a: Tensors, b: Tensors) -> torch.Tensor:
        parts = [(a[name] - b[name]).abs() for name in start]
        return torch.cat([part.flatten() for part in parts])

    return difference(expected, start), difference(expected, found)


def assert_same_trajectory(start: Tensors, expected: Tensors, found: Tensors) -> None:
    """Assert that two runs of 8 updates by AdamW at 1e-4 in fp32 differ only by the order of sums.

    On average they may differ by a hundredth of the movement, and by a few learning rates where
    Adam divides a small sum by its own size. Measured: below 1e-4 of the movement; with gradient
    noise of a hundredth 0.0137, and no more after 20 updates.
    """
    moved, off = distances(start, expected, found)
    assert moved.mean() > 5e-5
    assert off.mean() <= 0.01 * moved.mean()
    assert off.max() <= 8e-4


def poison(learner: Learner, name: str, value: float, only: int | None = None):
    """Set one element of one master's gradient to `value`, in every gradient or in that number
    `only`. Return the hook's handle.
    """
    numbers = itertools.count()

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        if next(numbers) == only or only is None:
            gradient.view(-1)[7] = value
        return gradient

    return learner.model.masters[name].register_hook(spoil)


def policy(
    scheme="w4a16", operators="engine", dtype=torch.bfloat16, kernel="reference"
) -> LowBitModel:
    return low_bit(random_model(), scheme, dtype, kernel, operators)


def experts_policy(dtype: torch.dtype) -> LowBitModel:
    return low_bit(random_moe(CONFIGS["qwen3_moe"]), "w8a8", dtype)


def batch_numbers(stats: LearnStats) -> list[float]:
    """Return a batch's numbers, which one process and several must agree on."""
    return [
        stats.loss,
        stats.grad_norm,
        stats.clipped,
        stats.entropy,
        stats.updates,
        stats.skipped,
        stats.kl,
    ]


def logprob_gradients(
    model: LowBitModel,
    batch: Batch,
    **how: Any,
) -> tuple[torch.Tensor, Tensors]:
    """Return log-probs, and the gradients of their sum weighted by position and row."""
    logprobs, _ = token_logprobs(
        model, batch.tokens, batch.response_mask, experts=batch.experts, **how
    )
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    (logprobs * weights).sum().backward()
    found = collected_gradients(model)
    for master in model.masters.values():
        master.grad = None
    return logprobs.detach(), found


def drift(a: Tensors, b: Tensors) -> tuple[float, float]:
    """Return the largest and mean |a - b| over all tensors, each in units of
    the tensor's mean |b|.
    """
    assert a.keys() == b.keys()
    parts = []
    for name in a:
        expected = b[name].double()
        unit = expected.abs().mean().clamp_min(1e-30)
        difference = (a[name].double() - expected).abs()
        parts.append((difference / unit).flatten())
    off = torch.cat(parts)
    return float(off.max()), float(off.mean())


def random_batch(
    lengths: list[int], vocabulary: int, experts: tuple[int, int, int] | None = None
) -> Batch:
    """Return a batch of sequences of these lengths.

    The first token of each is its prompt. experts: (layers, experts per token, number of experts).
    """
    generator = seeded(sum(lengths))
    longest = max(lengths)
    length = torch.tensor(lengths)
    tokens = torch.randint(0, vocabulary, (len(lengths), longest), generator=generator)
    response_mask = torch.arange(longest - 1)[None] < length[:, None] - 1
    chosen = None
    if experts:
        layers, k, count = experts
        order = torch.rand(len(lengths), longest, layers, count, generator=generator).argsort(-1)
        chosen = order[..., :k].to(torch.int32)
    zeros = torch.zeros(response_mask.shape)
    return Batch(tokens, length, response_mask, zeros, zeros, torch.arange(len(lengths)), chosen)
