"""Lost updates and flipped codes: counted right for every way codes are stored, and without a trace in the run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.seeds import step_seed
from qarl.learner.batching import Batch, mini_batches
from qarl.learner.diagnostics.base import is_due
from qarl.learner.learner import Learner
from qarl.learner.optim import master_step
from qarl.learner.optim.master_step import crossed_bfloat16
from qarl.quant.layers.context import Forward
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.materialize import code_changes as flips
from qarl.quant.materialize.code_changes import changed_codes
from qarl.quant.schemes import SCHEMES, get_scheme
from tests.support.learners import batch_of, make_learner, masters_of
from tests.support.models import low_bit
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.profiles import examples

QUANTIZED = [name for name in SCHEMES if name != "bf16"]


@pytest.mark.parametrize("scheme", QUANTIZED)
@given(seed=st.integers(0, 2**20), rows=st.sampled_from([1, 3, 128]), moved=st.floats(0, 1))
@settings(max_examples=examples(5))
def test_changed_codes_are_those_that_differ_when_unpacked(scheme: str, seed: int, rows: int, moved: float):
    """Contract: the count over packed bytes is that over codes one an element, in chunks of any size. Unpacked fp8 and
    fp4 codes are compared by value, so signs of zeros are made to agree first."""
    found = get_scheme(scheme)
    rows = rows if found.block is None else found.block[0]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 256, generator=generator)
    other = torch.where(torch.rand(weight.shape, generator=generator) < moved, weight * 0.7, weight)
    first, second = (materialize(w, found, torch.bfloat16) for w in (weight, other))
    one, two = (low_bit.unpacked().to(torch.float32) for low_bit in (first, second))
    expected = int(((one != two) | (one.signbit() != two.signbit())).sum())
    chunk, flips._CHUNK_BYTES = flips._CHUNK_BYTES, 1 + seed % 300
    try:
        assert changed_codes(first.codes, second) == expected
        assert changed_codes(second.codes, second) == 0
    finally:
        flips._CHUNK_BYTES = chunk


def test_crossings_by_hand():
    """Neighbours of 1 in bfloat16 are 2^-7 above and 2^-8 below: 1 + 2^-9 and 1 - 2^-10 round to it, 1 + 2^-7 and
    1 - 2^-8 do not. In chunks of any size."""
    before, after = torch.ones(2, 2), torch.tensor([[1 + 2**-9, 1 + 2**-7], [1 - 2**-10, 1 - 2**-8]])
    assert int(crossed_bfloat16(before, after)) == 2
    long = torch.ones(master_step._CHUNK + 3)
    long[[0, -1]] = 1.5
    assert int(crossed_bfloat16(torch.ones_like(long), long)) == 2


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "nvfp4a16", "bf16"])
def test_changes_by_layer_are_those_of_its_masters_and_codes(scheme: str):
    """Contract: over one update of a mixture of experts, each layer's share of crossings is that of the masters before
    and after, of flips that of the codes it publishes, unpacked; a layer in the compute dtype (routers, output head,
    embeddings) has no codes. The shares over all are the layers' put together, of crossings less vectors."""
    model = low_bit(random_moe(CONFIGS["qwen3_moe"]), scheme)
    learner = Learner(model, LearnerConfig.model_validate({"mini_batches": 1, "optimizer": {"lr": 1e-4}}))
    before = masters_of(learner)
    codes = {layer.layer: flips.quantized_weights(layer.low_bit) for layer in model.low_bit_layers()}
    old = {name: [weight.unpacked().float() for weight in weights] for name, weights in codes.items() if weights}
    found = learner.learn(batch_of(), 0)
    after = masters_of(learner)
    crossed = {name: float((before[name].bfloat16() != after[name].bfloat16()).float().mean()) for name in after}
    layers = found.records["layers"]
    assert layers.layer is not None and layers.flipped_codes is not None and layers.crossed_bfloat16 is not None
    by_layer = dict(zip(layers.layer, layers.crossed_bfloat16, strict=True))
    query = "model.layers.0.self_attn.q_proj"
    assert by_layer[query] == pytest.approx(crossed[f"{query}.weight"]) and 0 < crossed[f"{query}.weight"] < 1
    assert by_layer["model.embed_tokens"] == pytest.approx(crossed["model.embed_tokens.weight"])
    assert "model.norm" not in by_layer
    differ = {name: torch.cat([apart(*pair) for pair in zip(old[name], codes[name], strict=True)]) for name in old}
    flipped = {n: share for n, share in zip(layers.layer, layers.flipped_codes, strict=True) if share is not None}
    assert flipped == pytest.approx({name: float(codes.float().mean()) for name, codes in differ.items()})
    published = [t.name.rpartition(".")[0] for t in model.low_bit_tensors() if t.name.endswith("weight_scale")]
    assert sum(map(len, differ.values())) == sum(math.prod(model.shapes[layer]) for layer in published)
    whole = float(torch.cat([*differ.values()]).double().mean()) if differ else None
    assert found.records["flipped_codes"] == (whole and pytest.approx(whole)) and (whole is None or 0 < whole < 1)
    sizes = {name: master.numel() for name, master in model.masters.items()}
    assert found.records["crossed_bfloat16"] == pytest.approx(
        sum(crossed[name] * size for name, size in sizes.items()) / sum(sizes.values())
    )


def apart(old: torch.Tensor, weight: LowBitWeight) -> torch.Tensor:
    """Which codes are others now, signs of zeros included, bool and flat."""
    new = weight.unpacked().float()
    return ((old != new) | (old.signbit() != new.signbit())).flatten()


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_measured_steps(every: int, due: list[int]):
    assert [step for step in range(7) if is_due(every, step)] == due


@pytest.mark.parametrize("aligned", [True, False])
def test_distance_from_the_start(aligned: bool):
    """Contract: after two batches of a learner that measures in both, KL(π_start ‖ π) on the first batch's sample is
    k3 by hand, of log-probs of the codes before and after, and grew; a learner that went through a checkpoint in
    between has it to the last bit; one that measured nothing at first has none."""

    def new(every: int) -> Learner:
        return make_learner("w4a16", aligned=aligned, optimizer={"lr": 1e-2}, diagnostics_every=every)

    def logprobs(learner: Learner, batch: Batch) -> torch.Tensor:
        with learner.model.forward_as(Forward.PUBLISHED):
            return learner.logprobs(batch)[0]

    learner, first = new(1), batch_of()
    rows = mini_batches(first, learner.config.mini_batches, step_seed(0, 0))[0]
    sample = first.rows(rows)
    before = logprobs(learner, sample)
    early = learner.learn(first, 0).records["kl_from_start"]
    resumed = new(1)
    resumed.load_state_dict(learner.state_dict())
    late = learner.learn(batch_of(1), 1).records["kl_from_start"]
    difference = (logprobs(learner, sample) - before)[sample.response_mask].double()
    assert late == pytest.approx(float((difference.exp() - 1 - difference).mean()), rel=1e-3)
    assert early is not None and late is not None and 0 < early < late
    assert resumed.learn(batch_of(1), 1).records["kl_from_start"] == late
    begun, before_all = new(1), new(1)
    begun.load_state_dict(before_all.state_dict())
    assert begun.learn(first, 0).records["kl_from_start"] == early, (
        "a checkpoint of before the first update is none of a start"
    )
    unmeasured = new(0)
    assert unmeasured.learn(first, 0).records["kl_from_start"] is None
    resumed.load_state_dict(unmeasured.state_dict())
    assert resumed.learn(batch_of(1), 1).records["kl_from_start"] is None
