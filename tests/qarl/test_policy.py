"""A policy without an engine: its shapes and gradients, losses, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import qarl
from qarl.configs.errors import ConfigError, GraphError, ModelError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.loss.aggregation import BatchSize
from qarl.learner.loss.loss import LossInput, policy_loss
from qarl.learner.objectives import OBJECTIVES
from tests.support.learners import batch_of, random_model
from tests.support.models import VOCABULARY, loss_of, some_tokens


@pytest.fixture(params=["engine", "transformers"])
def aligned(request: pytest.FixtureRequest, random_policy: Callable[[bool], Path]) -> qarl.Policy:
    options: dict[str, Any] = {
        "kernel": "reference",
        "operators": request.param,
        "tokenizer": random_policy(True),
    }
    return qarl.align(random_model(), "w8a8", **options)


def test_sequences_are_the_same_however_they_come(aligned: qarl.Policy):
    """Contract: logits, log-probs and gradients of rows of one length are those of the same tokens
    padded on the left or the right and packed, to the last bit but for the gradients, whose sums
    are in another order.
    """
    tokens = some_tokens(2, 5)
    real = torch.ones(2, 8)
    left = torch.zeros(2, 8, dtype=torch.int64)
    right = tokens.flatten()[None]
    real[0, :3] = 0
    left[0, 3:] = tokens[0]
    left[1, :5] = tokens[1]
    real[1, 5:] = 0
    ways: list[dict[str, Any]] = [
        {"input_ids": tokens},
        {"input_ids": left, "attention_mask": real},
        {"input_ids": right, "cu_seqlens": torch.tensor([0, 5, 10])},
        {"input_ids": right, "position_ids": torch.arange(5).repeat(2)[None]},
    ]
    seen = []
    for way in ways:
        logits = aligned(**way).logits
        kept = way.get("attention_mask", torch.ones_like(way["input_ids"])).bool()
        assert logits.dtype == aligned.dtype
        assert not logits[~kept].any()
        values, entropies = aligned.logprobs(**way, temperature=0.7)
        loss_of(logits[kept].view(2, 5, -1), tokens).backward()
        gradients = torch.cat(
            [m.grad.flatten() for m in aligned.parameters() if m.grad is not None]
        )
        seen.append(
            (
                logits[kept].detach(),
                values[values != 0].detach(),
                entropies[entropies != 0],
                gradients,
            )
        )
        aligned.zero_grad()
    expected = (
        (seen[0][0].float() / 0.7)
        .log_softmax(-1)
        .view(2, 5, -1)[:, :-1]
        .gather(-1, tokens[:, 1:, None])
    )
    torch.testing.assert_close(
        seen[0][1],
        expected.flatten(),
        rtol=0,
        atol=1e-5,
    )
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0][:3], other[:3], strict=True))
        torch.testing.assert_close(
            seen[0][3],
            other[3],
            rtol=1e-3,
            atol=1e-4,
        )
    whole = aligned(left, attention_mask=real).logits
    assert torch.equal(aligned(left, attention_mask=real, logits_to_keep=3).logits, whole[:, -3:])


def test_a_batch_is_scored_as_its_rows_are(aligned: qarl.Policy):
    """Contract: scores keep the batch's order, however it is cut and whichever rows share a prompt.
    With the engine's operators they are equal bit for bit.
    """
    batch = batch_of()
    values, _ = aligned.logprobs(batch.tokens, batch.response_mask, batch.real())
    small = aligned.settings.learner.model_copy(update={"micro_batch_tokens": 32})
    aligned.settings = aligned.settings.model_copy(update={"learner": small})
    apart = 0.0 if aligned.low_bit.operators == "engine" else 0.2
    torch.testing.assert_close(aligned.batch_logprobs(batch), values, rtol=0, atol=apart)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_losses_are_the_learners(name: str):
    batch = batch_of()
    config = LearnerConfig.model_validate({"objective": {"name": name}, "mini_batches": 1})
    new = (batch.sampler_logprobs * 1.01).requires_grad_()
    sampler = batch.sampler_logprobs
    tensors = sampler, sampler, batch.advantages, batch.response_mask
    terms = LossInput(
        new,
        sampler,
        sampler,
        None,
        response_mask=tensors[3],
        advantages=tensors[2],
    )
    expected = policy_loss(
        terms,
        config,
        BatchSize(len(new), int(batch.response_mask.sum())),
    )
    share = getattr(qarl.losses, name)(new, *tensors)
    assert torch.equal(share.loss, expected.loss)
    assert share.metrics == expected.metrics
    loss = getattr(qarl.losses, name)
    weights = torch.rand_like(new)
    alone = (
        loss(new, *tensors, correction="none", aggregation="token-mean").loss
        * batch.response_mask.sum()
    )
    terms = new, sampler, batch.advantages
    of_tokens = loss.of_tokens(*terms, batch.response_mask)
    assert of_tokens.loss.shape == of_tokens.clipped.shape == new.shape
    torch.testing.assert_close((of_tokens.loss * batch.response_mask).sum(), alone)
    assert torch.equal(
        loss.of_tokens(*terms, batch.response_mask, weights).loss,
        of_tokens.loss * weights,
    )
    for call in (
        lambda: loss(new, *tensors, sideways=1),
        lambda: loss.of_tokens(*terms, tensors[3], sideways=1),
    ):
        with pytest.raises(ConfigError, match=r"'sideways' is unknown|takes no options"):
            call()


def test_models_that_cannot_be_aligned():
    # it would do nothing
    with pytest.raises(ConfigError, match="align has no option 'mini_batches'"):
        qarl.align(random_model(), mini_batches=2)
    peft, quantized, frozen = (random_model() for _ in range(3))
    peft.peft_config = {}  # pyright: ignore[reportAttributeAccessIssue]
    quantized.config.quantization_config = {"quant_method": "awq"}
    frozen.lm_head.weight.requires_grad_(False)
    for model, message in (
        (peft, "merge_and_unload"),
        (nn.DataParallel(frozen), r"\(\.module\)"),
        (quantized, "quantized already.*awq"),
        (frozen, "is frozen"),
        (nn.Linear(2, 2), "is a Linear"),
        (random_model(), "built in memory"),
    ):
        with pytest.raises(ModelError, match=message):
            qarl.align(model)  # pyright: ignore[reportArgumentType]


def test_a_policy_whose_masters_get_no_gradient_is_refused(
    random_policy: Callable[[bool], Path], monkeypatch
):
    """Some of the engine's operators have no derivative; transformers' all have one."""
    monkeypatch.setattr(
        "qarl.api.align.require_gradients", Mock(side_effect=GraphError("no gradient"))
    )
    options: dict[str, Any] = {"kernel": "reference", "tokenizer": random_policy(True)}
    qarl.align(random_model(), operators="transformers", **options)
    with pytest.raises(GraphError, match="no gradient"):
        qarl.align(random_model(), operators="engine", **options)


def test_calls_out_of_turn(aligned: qarl.Policy, tmp_path: Path):
    ids = some_tokens(2, 4)
    strangers = nn.LSTM(2, 2).parameters()
    others = [*aligned.parameters()]
    assert [len(group) for group in aligned.muon_groups()] == [
        14,
        len(others) - 14,
    ], "seven matrices of two layers"
    for fault, refused in (
        ("from 0 to 95", lambda: aligned(ids + VOCABULARY)),
        ("begin anew", lambda: aligned(ids, position_ids=torch.arange(8).view(2, 4))),
        ("give each as", lambda: aligned(ids, cu_seqlens=torch.tensor([0, 8]))),
        (
            "must begin with 0",
            lambda: aligned(ids[:1], cu_seqlens=torch.tensor([2, 6])),
        ),
        ("mask .* must be bool", lambda: aligned.logprobs(ids, torch.ones(2, 4))),
        ("temperature 0", lambda: aligned.logprobs(ids, temperature=0)),
        ("masters stay on", lambda: aligned.half()),
        (
            "first being 'a'",
            lambda: aligned.load_state_dict({"a": ids, **aligned.state_dict()}),
        ),
        (
            "leaves out 1 .* steps 4",
            lambda: aligned.check(torch.optim.SGD([*strangers, *others[1:]])),
        ),
    ):
        with pytest.raises(qarl.PolicyError, match=fault):
            refused()
    assert {*nn.ModuleDict({"a": aligned}).state_dict()} == {
        f"a.{name}" for name in aligned.state_dict()
    }
    # of equal rewards: a step that moves nothing is one, too
    (aligned.logprobs(ids)[0].sum() * 0).backward()
    torch.optim.SGD(aligned.parameters(), lr=0.1).step()
    aligned.refresh()
    aligned.logprobs(ids)[0].sum().backward()
    # an optimizer made before `align`
    with pytest.raises(qarl.PolicyError, match="none has moved"):
        aligned.refresh()
    # whose writes torch does not count
    torch.optim.AdamW(aligned.parameters(), fused=True).step()
    with pytest.raises(qarl.PolicyError, match="masters moved since version 1"):
        aligned.export(tmp_path / "export")
    aligned.refresh()
    digest = aligned.export(tmp_path / "export")
    state = {n: p.clone() for n, p in aligned.state_dict().items()}
    torch.optim.SGD(aligned.parameters(), lr=0.5).step()
    with pytest.raises(qarl.PolicyError, match="masters moved since version 2"):
        aligned(ids)
    aligned.load_state_dict(state)
    assert aligned.export(tmp_path / "again") == digest
