"""Tests of the parts of the log-ratio, of lost updates and of flipped codes.

Errors are planted, and each must come back under its own name; counting must be right for every
storage format of codes and must leave no trace in the run.

Blind spot: the models are tiny and the engine is a tensor of log-probs, so nothing here shows what
a real engine does (docs/explain/mismatch.md has those figures).
"""

import copy
import dataclasses
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.seeds import step_seed
from qarl.learner.batching import Batch, make_batch, micro_batches, mini_batches
from qarl.learner.diagnostics.base import Learning, is_due
from qarl.learner.diagnostics.decomposition import (
    SAMPLE_TOKENS,
    Decomposition,
    Forwards,
    decompose,
    sample_rows,
)
from qarl.learner.diagnostics.token_log import TokenLog
from qarl.learner.learn_stats import LearnStats
from qarl.learner.learner import Learner
from qarl.learner.optim import parameter_optimizer
from qarl.learner.optim.parameter_optimizer import crossed_bfloat16
from qarl.quant.layers.context import Forward
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.materialize import code_changes as flips
from qarl.quant.materialize.code_changes import changed_codes
from qarl.quant.schemes import SCHEMES, get_scheme
from tests.support.learners import (
    all_equal,
    batch_of,
    logprobs_of,
    make_groups,
    make_learner,
    masters_of,
    random_model,
)
from tests.support.models import cast, low_bit
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.profiles import examples
from tests.support.tensors import seeded

MINI_BATCHES = 4
PARTS = ("dtype", "scheme", "staleness", "kernel")
NOISE = 0.05
Recorded = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Masters before an update, and its rows."""


def learner_of(
    scheme: str,
    aligned: bool,
    compute: torch.dtype | None = None,
    master: torch.dtype = torch.float32,
    **config: Any,
) -> Learner:
    masters = cast(random_model(tied=False), master)
    model = low_bit(masters, scheme, operators="transformers", aligned=aligned, compute=compute)
    settings = {
        "aligned": aligned,
        "diagnostics_every": 1,
        "mini_batches": 1,
        "optimizer": {"lr": 1e-2},
        **config,
    }
    return Learner(model, LearnerConfig.model_validate(settings))


def scored(model: PreTrainedModel, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """Return the log-probs by transformers' own forward, fp32 [B, T-1].

    The rows are multiplied in the same micro-batches as by the learner, because the last bit of a
    bfloat16 product may depend on a row's place in its batch.
    """
    found = torch.zeros(batch.response_mask.shape)
    for part in micro_batches(batch, rows, 16384):
        some = batch.rows(part)
        with torch.no_grad():
            logits = model(input_ids=some.tokens).logits.float()
        logp = logits.log_softmax(-1)[:, :-1]
        picked = logp.gather(-1, some.tokens[:, 1:, None])[..., 0]
        found[part, : picked.shape[1]] = picked * some.response_mask
    return found


def dequantized_model(masters: dict[str, torch.Tensor], scheme: str) -> PreTrainedModel:
    """Return a plain bfloat16 model with the dequantized codes of the masters as linear weights."""
    model = random_model(tied=False)
    model.load_state_dict(masters)
    for name, linear in low_bit(copy.deepcopy(model), scheme).linears.items():
        model.get_parameter(f"{name}.weight").data = linear.codes().dequantized(torch.bfloat16)
    return cast(model, torch.bfloat16)


def record_updates(learner: Learner) -> list[Recorded]:
    """Return a list that receives, before every update, a copy of the masters and the rows of the
    update.
    """
    updates: list[Recorded] = []
    update = learner._update

    def record(learning: Learning, *arguments: Any) -> object:
        updates.append((masters_of(learner), learning.trained[arguments[-1]]))
        return update(learning, *arguments)

    learner._update = record  # type: ignore[method-assign]
    return updates


@pytest.mark.parametrize("planted", [*PARTS, "all"])
def test_planted_parts_are_recovered_and_named(planted: str):
    """Contract: each part is within 5 % of the difference between transformers' own models, and a
    part that was not planted is less than 5 % of the planted one.

    The sampler multiplies the codes of the first weights as the learner does. A planted kernel
    error is noise of 0.05 nats. The study's α and β are sums of parts.
    """
    every = planted == "all"
    scheme = "w4a16" if every or planted == "scheme" else "bf16"
    compute = torch.float32 if every or planted == "dtype" else None
    mini_batches = 2 if every or planted == "staleness" else 1
    learner = learner_of(scheme, False, compute, mini_batches=mini_batches)
    batch = batch_of()
    with learner.model.forward_as(Forward.PUBLISHED):
        sampler = logprobs_of(learner, batch).values
    coins = torch.randint(0, 2, sampler.shape, generator=seeded(1))
    signs = coins * 2.0 - 1
    noise = NOISE * signs * batch.response_mask * (every or planted == "kernel")
    batch = dataclasses.replace(batch, sampler_logprobs=sampler + noise)
    updates = record_updates(learner)
    found = learner.learn(batch, 0).records["log_ratio"]
    masters, rows = updates[-1]
    assert torch.equal(sample_rows(batch, rows), rows), (
        "all rows of the last mini-batch fit the sample"
    )
    stepped = random_model(tied=False)
    stepped.load_state_dict(masters)
    own = scored(cast(copy.deepcopy(stepped), compute or torch.bfloat16), batch, rows)
    rounded, codes = (
        scored(m, batch, rows)
        for m in (cast(stepped, torch.bfloat16), dequantized_model(masters, scheme))
    )
    true = {
        "dtype": own - rounded,
        "scheme": rounded - codes,
        "staleness": codes - sampler,
        "kernel": -noise,
    }
    true |= {"alpha": codes - sampler - noise, "beta": own - codes}
    mask = batch.response_mask[rows]
    sizes = {name: float(part[rows][mask].abs().mean()) for name, part in true.items()}
    largest = max(sizes[name] for name in PARTS)
    for name, size in sizes.items():
        assert getattr(found, name) == pytest.approx(
            size, rel=0.05, abs=0.05 * largest * (not every)
        ), name
    assert largest > 0.005
    if not every:
        assert max(PARTS, key=lambda name: getattr(found, name)) == planted


def test_an_aligned_learner_has_neither_dtype_nor_scheme_in_its_ratio():
    """Contract: dtype, scheme and β are zero for an aligned learner.

    Its parts come from the forwards that it computes anyway.
    """
    learner = learner_of("w4a16", True, mini_batches=2)
    batch = batch_of()
    old = logprobs_of(learner, batch).values
    found = learner.learn(dataclasses.replace(batch, sampler_logprobs=old), 0).records["log_ratio"]
    assert found.dtype == 0.0
    assert found.scheme == 0.0
    assert found.beta == 0.0
    assert found.signal_to_noise is None
    # rows of other micro-batches round otherwise
    assert found.kernel is not None
    assert found.kernel < 0.02
    assert found.staleness is not None
    assert found.staleness > 10 * found.kernel
    assert found.phantom_clipped == 0.0


def decomposition_by_hand(**config: Any) -> Decomposition:
    """Decompose four tokens with A = 1: one with β = 0.5 under W_k and 0 under W_j; one without any
    difference; one with α = 0.5; one with α = 0.5 and β = -0.5. The update moves the low-bit policy
    by 0.1, 0.1, -0.1 and 0.1.
    """
    beta = torch.tensor([[0.5, 0.0, 0.0, -0.5]])
    alpha = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    zeros = torch.zeros(1, 4)
    after = alpha + torch.tensor([[0.1, 0.1, -0.1, 0.1]])
    forwards = Forwards(
        own=alpha + beta,
        cast=alpha,
        published=alpha,
        before=zeros,
        after=after,
        sampler=zeros,
    )
    mask = torch.ones(1, 4, dtype=torch.bool)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    batch = Batch(
        tokens,
        torch.tensor([5]),
        mask,
        zeros,
        torch.ones(1, 4),
        torch.tensor([0]),
    )
    return decompose(
        forwards,
        zeros,
        batch,
        LearnerConfig.model_validate({"objective": {"name": "grpo"}, **config}),
    )


@pytest.mark.parametrize("ratio_from", ["learner", "sampler"])
def test_phantom_clipping_and_deployed_improvement_by_hand(ratio_from: str):
    """Contract: a token is phantom-clipped if α + β is outside the bounds and α alone is inside.

    That is the first token, whatever the denominator; the third is clipped rightly, the last is not
    clipped. A shadowed ratio has no phantom clipping.
    """
    found = decomposition_by_hand(correction={"name": "none", "ratio_from": ratio_from})
    assert found.phantom_clipped == 0.25
    assert found.alpha == 0.25
    assert found.beta == 0.25
    assert found.signal_to_noise == 1.0
    assert decomposition_by_hand(aligned=False, ratio_fix="shadow_forward").phantom_clipped == 0.0
    assert found.deployed_improvement == pytest.approx(0.05)
    assert found.deployed_efficiency == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("aligned", "compute", "master"),
    [
        (True, None, torch.bfloat16),
        (False, None, torch.float32),
        (False, torch.float32, torch.float32),
    ],
)
def test_measuring_leaves_no_trace(aligned: bool, compute: torch.dtype | None, master: torch.dtype):
    """Contract: after two batches, masters and all other statistics equal, bit for bit, those of a
    learner that measures nothing. This includes 16-bit masters with stochastic rounding, so the
    same random numbers are drawn.
    """
    measured, plain = (
        learner_of(
            "w4a16",
            aligned,
            compute,
            master,
            mini_batches=2,
            diagnostics_every=every,
            optimizer={"lr": 1e-4},
        )
        for every in (1, 0)
    )
    for step in range(2):
        found, expected = (learner.learn(batch_of(step), step) for learner in (measured, plain))
        assert expected.records["log_ratio"] == Decomposition()
        assert found.records["log_ratio"].scheme is not None
        assert found.loss == expected.loss
        assert found.grad_norm == expected.grad_norm
        assert found.mismatch == expected.mismatch
        for name in ("lost_updates", "crossed_bfloat16", "flipped_codes"):
            assert expected.records[name] is None
            assert 0 <= found.records[name] < 1
    assert all_equal(masters_of(measured), masters_of(plain))


def test_the_sample_stays_within_its_budget():
    batch = batch_of()
    rows = torch.arange(len(batch.tokens))
    assert torch.equal(sample_rows(batch, rows), rows)
    long = dataclasses.replace(batch, length=batch.length + SAMPLE_TOKENS // 3)
    assert sample_rows(long, rows[4:]).tolist() == [4, 5]
    assert sample_rows(
        dataclasses.replace(batch, length=batch.length + SAMPLE_TOKENS), rows[4:]
    ).tolist() == [4]


def stale_batch(learner: Learner) -> Batch:
    """Return a batch of which every other group was sampled by the codes before the last batch,
    except for the second half of each response. The present codes sampled everything else.
    """
    batch = batch_of(1)
    before = logprobs_of(learner, batch).values
    learner.learn(batch_of(0), 0)
    now = logprobs_of(learner, batch).values
    position = batch.response_mask.cumsum(-1)
    length = batch.response_mask.sum(-1, keepdim=True)
    even_group = (1 - batch.group % 2)[:, None]
    first_half = batch.response_mask & (2 * position <= length)
    behind = even_group * first_half
    sampler = torch.where(behind > 0, before, now)
    return dataclasses.replace(batch, sampler_logprobs=sampler, versions_behind=behind)


def test_planted_staleness_is_recovered_at_its_age():
    """Contract: the mismatch at every age is within 5 % of the difference between transformers' own
    models, at the weights of each update. A token's age is the number of updates in this batch,
    plus four for each version that was published since it was sampled. At age 0 there is no
    mismatch.
    """
    learner = learner_of("w4a16", True, mini_batches=MINI_BATCHES, diagnostics_every=0)
    batch = stale_batch(learner)
    behind = batch.versions_behind
    assert behind is not None
    updates = record_updates(learner)
    log = TokenLog(batch)
    found = learner.learn(batch, 1, log=log).records["ages"]
    true: dict[int, list[torch.Tensor]] = {}
    for update, (weights, index) in enumerate(updates):
        stepped = random_model(tied=False)
        stepped.load_state_dict(weights)
        mismatch = (
            scored(dequantized_model(weights, "w4a16"), batch, index) - batch.sampler_logprobs
        ).abs()
        for row in index.tolist():
            for versions in behind[row].unique().tolist():
                tokens = batch.response_mask[row] & (behind[row] == versions)
                true.setdefault(update + MINI_BATCHES * versions, []).append(mismatch[row][tokens])
            assert log.age[row] == update + MINI_BATCHES * int(behind[row].max())
    assert list(found.age) == sorted(true)
    trained = [batch.response_mask[index] for _, index in updates]
    assert sum(found.tokens) == sum(int(mask.sum()) for mask in trained)
    by_age = dict(zip(found.age, found.mean_abs, strict=True))
    largest = max(by_age.values())
    for age, parts in true.items():
        assert by_age[age] == pytest.approx(
            float(torch.cat(parts).mean()), rel=0.05, abs=0.02 * largest
        ), age
    assert min(found.age) == 0
    assert max(found.age) >= MINI_BATCHES
    assert by_age[0] < 0.05 * largest


def test_mismatch_of_a_sampler_one_version_behind_counts_as_staleness():
    """Contract: if the sampler is a version behind, its difference counts as staleness and not as
    the kernel's: the codes of W_k against the engine's log-probs, by hand for one mini-batch. α is
    the same.
    """

    def parts(behind: int) -> LearnStats:
        learner = learner_of("w4a16", True, mini_batches=1)
        batch = batch_of(1)
        before = logprobs_of(learner, batch).values
        learner.learn(batch_of(0), 0)
        versions = behind * batch.response_mask.long()
        return learner.learn(
            dataclasses.replace(batch, sampler_logprobs=before, versions_behind=versions),
            1,
        )

    fresh = parts(0).records["log_ratio"]
    stale = parts(1)
    assert fresh.staleness == 0
    assert fresh.kernel
    assert stale.records["log_ratio"].kernel is None
    assert (
        stale.records["log_ratio"].staleness
        == fresh.kernel
        == stale.records["log_ratio"].alpha
        == fresh.alpha
    )
    assert stale.records["ages"].age == (1,)


def test_a_sequences_tokens_of_two_versions_are_counted_at_two_ages():
    """Contract: each response token counts once, at its own version's age; the mean is by hand."""
    learner = learner_of("w4a16", True, mini_batches=1)
    batch = batch_of(1)
    distance = (logprobs_of(learner, batch).values - batch.sampler_logprobs).abs()
    behind = torch.zeros_like(batch.response_mask, dtype=torch.int64)
    behind[:, ::2] = 1
    behind *= batch.response_mask
    ages = learner.learn(dataclasses.replace(batch, versions_behind=behind), 1).records["ages"]
    masks = [batch.response_mask & (behind == age) for age in (0, 1)]
    assert ages.age == (0, 1)
    assert ages.tokens == tuple(int(mask.sum()) for mask in masks)
    assert ages.mean_abs == pytest.approx([float(distance[mask].mean()) for mask in masks])


def test_ages_come_from_the_versions_that_sampled():
    """Contract: ages are per token.

    From each switch of a completion on, a token belongs to the version that the switch names.
    """
    groups = []
    for n, g in enumerate(make_groups()):
        versions: dict[str, Any] = {"weight_version": n, "switches": ((1, n + 2),)}
        of_two = [dataclasses.replace(completion, **versions) for completion in g.completions]
        groups.append(dataclasses.replace(g, completions=tuple(of_two)))
    batch = make_batch(groups, 0, version=7)
    first = [n for n, g in enumerate(groups) for _ in g.completions]
    assert batch.versions_behind is not None
    for behind, mask, n in zip(batch.versions_behind, batch.response_mask, first, strict=True):
        later = int(mask.sum()) - 1
        assert behind[mask].tolist() == [7 - n] + [5 - n] * later
        assert not behind[~mask].any()
    assert make_batch(groups, 0).versions_behind is None


QUANTIZED = [name for name in SCHEMES if name != "bf16"]


@pytest.mark.parametrize("scheme", QUANTIZED)
@given(
    seed=st.integers(0, 2**20),
    rows=st.sampled_from([1, 3, 128]),
    moved=st.floats(0, 1),
)
@settings(max_examples=examples(5))
def test_changed_codes_are_those_that_differ_when_unpacked(
    scheme: str, seed: int, rows: int, moved: float
):
    """Contract: the count over packed bytes equals the count over unpacked codes, in chunks of any
    size. Unpacked fp8 and fp4 codes are compared by value and by sign bit, so a zero that changes
    sign counts.
    """
    found = get_scheme(scheme)
    rows = rows if found.block is None else found.block[0]
    generator = seeded(seed)
    weight = torch.randn(rows, 256, generator=generator)
    fresh = torch.randn(rows, 256, generator=generator)
    other = torch.where(torch.rand(weight.shape, generator=generator) < moved, fresh, weight)
    first, second = (materialize(w, found, torch.bfloat16) for w in (weight, other))
    with mock.patch.object(flips, "_CHUNK_BYTES", 1 + seed % 300):
        assert changed_codes(first.codes, second) == int(
            differing_codes(first.unpacked().float(), second).sum()
        )
        assert changed_codes(second.codes, second) == 0


def test_crossed_bfloat16_counts_changed_bfloat16_values():
    """Contract: a weight crosses if its bfloat16 value changes, in chunks of any size.

    The bfloat16 neighbours of 1 are 2^-7 above and 2^-8 below: 1 + 2^-9 and 1 - 2^-10 round to 1,
    but 1 + 2^-7 and 1 - 2^-8 do not.
    """
    before = torch.ones(2, 2)
    after = torch.tensor(
        [
            [1 + 2**-9, 1 + 2**-7],
            [1 - 2**-10, 1 - 2**-8],
        ]
    )
    assert int(crossed_bfloat16(before, after)) == 2
    long = torch.ones(parameter_optimizer._CHUNK + 3)
    long[[0, -1]] = 1.5
    assert int(crossed_bfloat16(torch.ones_like(long), long)) == 2


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "nvfp4a16", "bf16"])
def test_reported_crossings_and_flips_are_those_of_masters_and_codes(scheme: str):
    """Contract: over one update of a mixture of experts, the fraction of crossings is that of the
    masters, and the fraction of flips is that of the unpacked published codes. Layers in the
    compute dtype (routers, output head, embeddings) have no codes.
    """
    model = low_bit(random_moe(CONFIGS["qwen3_moe"]), scheme)
    learner = Learner(
        model,
        LearnerConfig.model_validate({"mini_batches": 1, "optimizer": {"lr": 1e-4}}),
    )
    before = masters_of(learner)
    codes = {
        layer.layer: flips.quantized_weights(layer.low_bit) for layer in model.low_bit_layers()
    }
    old = {
        name: [weight.unpacked().float() for weight in weights]
        for name, weights in codes.items()
        if weights
    }
    found = learner.learn(batch_of(), 0)
    after = masters_of(learner)
    moved = {name: before[name].bfloat16() != after[name].bfloat16() for name in after}
    crossed = {name: float(elements.float().mean()) for name, elements in moved.items()}
    differ = {
        name: torch.cat(
            [differing_codes(*pair) for pair in zip(old[name], codes[name], strict=True)]
        )
        for name in old
    }
    published = [
        t.name.rpartition(".")[0]
        for t in model.low_bit_tensors()
        if t.name.endswith("weight_scale")
    ]
    assert sum(map(len, differ.values())) == sum(
        math.prod(model.plan.shapes[layer]) for layer in published
    )
    if differ:
        flipped = float(torch.cat([*differ.values()]).double().mean())
        assert found.records["flipped_codes"] == pytest.approx(flipped)
        assert 0 < flipped < 1
    else:
        assert found.records["flipped_codes"] is None
    sizes = {name: master.numel() for name, master in model.masters.items()}
    assert found.records["crossed_bfloat16"] == pytest.approx(
        sum(crossed[name] * size for name, size in sizes.items()) / sum(sizes.values())
    )


def differing_codes(old: torch.Tensor, weight: LowBitWeight) -> torch.Tensor:
    """Return which codes changed, as a flat bool tensor. A change of a zero's sign counts."""
    new = weight.unpacked().float()
    other_value = old != new
    other_sign = old.signbit() != new.signbit()
    return (other_value | other_sign).flatten()


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (0, []),
        (1, [0, 1, 2, 3, 4, 5, 6]),
        (3, [0, 3, 6]),
    ],
)
def test_diagnostics_are_due_at_every_nth_step_and_never_at_interval_zero(
    every: int, due: list[int]
):
    assert [step for step in range(7) if is_due(every, step)] == due


@pytest.mark.parametrize("aligned", [True, False])
def test_distance_from_the_start(aligned: bool):
    """Contract: a learner that measures two batches reports KL(π_start ‖ π) on the first batch's
    sample as k3, computed here by hand from log-probs of the codes before and after; it grows.

    A learner that went through a checkpoint in between reports the same, bit for bit. One that did
    not measure the first batch reports none.
    """

    def new(every: int) -> Learner:
        return make_learner(
            "w4a16", aligned=aligned, optimizer={"lr": 1e-2}, diagnostics_every=every
        )

    def logprobs(learner: Learner, batch: Batch) -> torch.Tensor:
        with learner.model.forward_as(Forward.PUBLISHED):
            return logprobs_of(learner, batch).values

    learner = new(1)
    first = batch_of()
    rows = mini_batches(first, learner.config.mini_batches, step_seed(0, 0))[0]
    sample = first.rows(rows)
    before = logprobs(learner, sample)
    early = learner.learn(first, 0).records["kl_from_start"]
    resumed = new(1)
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    late = learner.learn(batch_of(1), 1).records["kl_from_start"]
    difference = (logprobs(learner, sample) - before)[sample.response_mask].double()
    assert late == pytest.approx(
        float((difference.exp() - 1 - difference).mean()),
        rel=1e-3,
    )
    assert early is not None
    assert late is not None
    assert 0 < early < late
    assert resumed.learn(batch_of(1), 1).records["kl_from_start"] == late
    begun = new(1)
    before_all = new(1)
    begun.load_state_dict(before_all.state_dict())
    assert begun.learn(first, 0).records["kl_from_start"] == early, (
        "before the first update none has a start"
    )
    unmeasured = new(0)
    assert unmeasured.learn(first, 0).records["kl_from_start"] is None
    resumed.load_state_dict(unmeasured.state_dict())
    assert resumed.learn(batch_of(1), 1).records["kl_from_start"] is None
