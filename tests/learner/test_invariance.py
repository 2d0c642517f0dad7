"""Tests of settings that may change time and memory but not what is learned: packing, chunked
log-probs, checkpointed layers.

Axes: B sequences, T tokens.
"""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.configs.errors import ConfigError, GraphError
from qarl.learner.load_balance import load_balance_loss
from qarl.learner.logprobs import packs, shares_prompts, token_logprobs
from tests.support import learners
from tests.support.learners import (
    batch_of,
    drift,
    experts_policy,
    logprob_gradients,
    policy,
    random_batch,
)
from tests.support.models import collected_gradients
from tests.support.profiles import examples

BFLOAT16 = torch.bfloat16


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=6))
@settings(max_examples=examples(15))
def test_packed_log_probs_and_gradients_are_those_of_padded_sequences(
    lengths: list[int],
):
    """Contract: in fp32 without quantization rounding of activations, only the order of sums
    differs: at most 1e-4 nats, and on average 1e-4 of a tensor's mean gradient. Attention across
    sequences, or positions that do not restart, would be off by nats.
    """
    model = policy("w4a16", dtype=torch.float32)
    batch = random_batch(lengths, learners.VOCABULARY)
    padded, expected = logprob_gradients(model, batch)
    packed, found = logprob_gradients(model, batch, packed=batch.packed())
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-4)
    largest, mean = drift(found, expected)
    assert largest <= 1e-2
    assert mean <= 1e-4


@pytest.mark.parametrize("share_prompts", [False, True])
def test_gradients_by_two_threads_repeat_bit_for_bit(share_prompts: bool):
    """Contract: a run repeats bit for bit with the same number of threads.

    Sums by atomics would differ in nearly every try.
    """
    model = policy()
    batch = random_batch([24] * 100, learners.VOCABULARY)
    threads = torch.get_num_threads()
    model.gradients.configure(in_place=True, reduce_dtype=torch.float32)
    packed = batch.packed(share_prompts=share_prompts)
    torch.set_num_threads(2)
    try:
        first, *others = [logprob_gradients(model, batch, packed=packed)[1] for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    assert all(learners.all_equal(first, other) for other in others)


def test_packed_experts_are_those_replayed_and_padding_reaches_no_router():
    """Contract: a packed token goes to the experts that are replayed for it, and router logits
    exist for real tokens only.
    """
    model = experts_policy(torch.float32)
    config = model.config
    chosen = config.num_hidden_layers, config.num_experts_per_tok, config.num_experts
    batch = random_batch([7, 12, 3], config.vocab_size, chosen)
    model.router_log.enabled = True
    padded, expected = logprob_gradients(model, batch)
    of_all = [logits[batch.real().flatten()].detach() for logits in model.router_log.logits]
    packed, found = logprob_gradients(model, batch, packed=batch.packed())
    torch.testing.assert_close(packed, padded, rtol=0, atol=0.02)  # int8 codes may flip
    assert drift(found, expected)[1] <= 0.05
    for ours, theirs in zip(model.router_log.logits, of_all, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=0.02)
    other = dataclasses.replace(batch, experts=batch.experts.flip(1))  # type: ignore[union-attr]
    by_other_experts, _ = logprob_gradients(model, other, packed=other.packed())
    assert (by_other_experts - packed).abs().max() > 0.05


@pytest.mark.parametrize("kernel", ["vllm", "reference"])
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8"])
def test_a_shared_prompt_changes_no_log_prob(scheme: str, kernel: str):
    """Contract: a prompt that is computed once for its group gives every response the log-probs
    that it has by itself, bit for bit in bfloat16 by the engine's kernels; gradients agree up to
    rounding. A response that saw another's tokens or had other positions would be off by nats.
    """
    model = policy(scheme, kernel=kernel)
    batch = batch_of()
    each, expected = logprob_gradients(model, batch, packed=batch.packed())
    packed = batch.packed(share_prompts=True)
    groups = batch.group.tolist()
    repeats = torch.tensor([group in groups[:row] for row, group in enumerate(groups)])
    saved = int((batch.prompt_length() * repeats).sum())
    assert int(packed.kept.sum()) == int(batch.length.sum()) - saved
    once, found = logprob_gradients(model, batch, packed=packed)
    torch.testing.assert_close(once, each, rtol=0, atol=0 if kernel == "vllm" else 0.1)
    assert drift(found, expected)[1] <= 0.02


def test_a_prompt_with_other_tokens_or_experts_is_not_shared():
    """Contract: a prompt is taken from the group's first sequence only if all tokens and all
    replayed experts are equal.
    """
    batch = dataclasses.replace(
        batch_of(),
        experts=torch.zeros(24, 32, 2, 3, dtype=torch.int32),
    )
    longest = int(batch.length.max())
    batch = dataclasses.replace(batch, experts=batch.experts[:, :longest])  # type: ignore[index]
    batch.tokens[1, 0] += 1
    batch.experts[5, 0, 1, 2] = batch.experts[6, -1] = 3  # type: ignore[index]
    shared = batch.packed(share_prompts=True).sequences
    whole = [
        row
        for row, (own, seen) in enumerate(zip(shared.lengths, shared.seen, strict=True))
        if own == seen
    ]
    assert whole == [0, 1, 4, 5, 8, 12, 16, 20]
    batch.response_mask[2] = False
    assert batch.prompt_length()[2] == 0, "nothing of it is learned from"


def test_a_shared_prompts_routers_count_for_every_sequence():
    """Contract: the load-balance loss equals that of sequences that each bring their own prompt."""
    model = experts_policy(torch.float32)
    batch = random_batch([7, 12, 9], 64)
    batch.group.zero_()
    batch.tokens[:, :5] = batch.tokens[0, :5]
    batch.response_mask[:, :4] = False
    model.router_log.enabled = True
    losses = []
    for packed in (batch.packed(), batch.packed(share_prompts=True)):
        with torch.no_grad():
            token_logprobs(model, batch.tokens, batch.response_mask, packed=packed)
        losses.append(load_balance_loss(model, batch.real(), packed))
    assert len(model.router_log.logits[0]) == 28 - 10
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("scheme", ["bf16", "w4a16"])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_log_prob(scheme: str, dtype: torch.dtype, chunk: int):
    """Contract: log-probs and entropies in chunks equal those of all positions at once.

    In bfloat16 this holds bit for bit from 7 rows on, because the head's sums are rounded to 8
    bits; a single row is another product and may differ by one rounding. Gradients agree up to the
    order of sums.
    """
    model = policy(scheme, dtype=dtype)
    batch = batch_of()
    whole, expected = logprob_gradients(model, batch, chunk_tokens=10**6)
    parts, found = logprob_gradients(model, batch, chunk_tokens=chunk)
    with torch.no_grad():
        arguments = model, batch.tokens, batch.response_mask
        entropies = [token_logprobs(*arguments, chunk_tokens=c)[1] for c in (10**6, chunk)]
    exact = dtype == BFLOAT16 and chunk > 1
    torch.testing.assert_close(
        parts, whole, rtol=0, atol=0 if exact else 0.05 if dtype == BFLOAT16 else 1e-5
    )
    torch.testing.assert_close(
        *entropies, rtol=0, atol=0 if exact else 0.05 if dtype == BFLOAT16 else 1e-5
    )
    assert drift(found, expected)[1] <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("temperature", [1.0, 1.1])
def test_log_probs_and_gradients_are_autograds(temperature: float):
    """Contract: log-probs and gradients equal those of plain autograd through `log_softmax` of the
    model's own logits / T at position t, read at token t + 1, without chunks or a backward of ours.
    The entropy is that of the same distribution, in nats; outside the response everything is zero.

    Blind spot: the logits themselves; tests/quant/test_model.py compares them with transformers'.
    """
    model = policy(dtype=torch.float32)
    batch = batch_of()
    ours, found = logprob_gradients(model, batch, chunk_tokens=5, temperature=temperature)
    mask = batch.response_mask
    wanted = torch.nn.functional.pad(batch.response_mask, (0, 1))
    logits = model.head(model.hidden(batch.tokens, wanted))
    logp = (logits / temperature).log_softmax(-1)
    targets = batch.tokens[:, 1:][mask]
    picked = logp.gather(-1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 1, mask.numel()).view_as(mask)[mask]
    (picked * weights).sum().backward()
    expected = collected_gradients(model)
    assert drift(found, expected)[1] <= 1e-5
    torch.testing.assert_close(ours[mask], picked)
    learner = learners.make_learner("w4a16", torch.float32, temperature=temperature)
    torch.testing.assert_close(learners.logprobs_of(learner, batch).values, ours)
    with torch.no_grad():
        _, entropy = token_logprobs(model, batch.tokens, mask, temperature=temperature)
    torch.testing.assert_close(
        entropy[mask],
        -(logp.exp() * logp).sum(-1),
    )
    assert ours.dtype == torch.float32
    assert not ours[~mask].any()
    assert not entropy[~mask].any()


@pytest.mark.parametrize("operators", ["engine", "transformers"])
@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
def test_checkpointed_layers_give_the_same_bits(scheme: str, operators: str):
    model = policy(scheme, operators)
    batch = batch_of()
    kept, expected = logprob_gradients(model, batch)
    model.set_gradient_checkpointing(True)
    calls = mock.Mock(return_value=None)
    name = "model.layers.0.self_attn"
    first = (
        model.graph.module.get_submodule(name)
        if operators == "engine"
        else model.linears[f"{name}.q_proj"]
    )
    first.register_forward_pre_hook(calls)
    again, found = logprob_gradients(model, batch)
    assert calls.call_count == 2, (
        "the first layer's attention is computed in the forward and once more in the backward"
    )
    model.set_gradient_checkpointing(False)
    back, _ = logprob_gradients(model, batch)
    assert calls.call_count == 3
    assert torch.equal(again, kept)
    assert torch.equal(back, kept)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in found)


def test_checkpointed_experts_count_their_routers_once():
    """Contract: the backward passes through every router again, but the load-balance loss and
    replay see one forward.
    """
    model = experts_policy(BFLOAT16)
    model.router_log.enabled = True
    batch = random_batch([7, 12, 3], model.config.vocab_size)
    kept, expected = logprob_gradients(model, batch, packed=batch.packed())
    model.set_gradient_checkpointing(True)
    again, found = logprob_gradients(model, batch, packed=batch.packed())
    assert len(model.router_log.logits) == len(model.experts)
    assert torch.equal(again, kept)
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("setting", ["packing", "prompts"])
def test_packing_and_shared_prompts_end_at_the_same_masters(setting: str):
    """Contract: 8 updates by AdamW in fp32 end at the same masters, also with other micro-batches
    and chunks.
    """
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "packing": (
            {"packing": True, "share_prompts": False},
            {"packing": False, "logprob_chunk_tokens": 16},
        ),
        "prompts": (
            {"share_prompts": True},
            {"share_prompts": False, "micro_batch_tokens": 30},
        ),
    }
    ends = []
    for way in ways[setting]:
        learner = learners.make_learner(
            "bf16", torch.float32, optimizer={"lr": 1e-4, "name": "adamw"}, **way
        )
        start = learners.masters_of(learner)
        for step in range(4):
            assert learner.learn(batch_of(), step=step).updates == 2
        ends.append(learners.masters_of(learner))
    learners.assert_same_trajectory(start, *ends)


def test_packing_without_the_engines_operators_is_refused():
    """Contract: `auto` packs if the operators are the engine's.

    `true` without them, a shared prompt without packing, and a packed forward without them are
    errors.
    """
    engine = policy()
    plain = policy(operators="transformers")
    assert packs(engine, "auto")
    assert packs(engine, True)
    assert not packs(engine, False)
    assert not packs(plain, "auto")
    with pytest.raises(
        ConfigError, match=r"learner\.packing is true.*learner\.operators.*'engine'"
    ):
        packs(plain, True)
    with pytest.raises(
        ConfigError,
        match=r"learner\.share_prompts is true.*not packed.*learner\.packing",
    ):
        shares_prompts(packed=False, setting=True, device=torch.device("cpu"))
    batch = batch_of()
    with pytest.raises(GraphError, match="has transformers'; leave sequences padded"):
        token_logprobs(plain, batch.tokens, batch.response_mask, packed=batch.packed())
