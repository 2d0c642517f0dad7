"""Publishes, compared with freshly loaded engines, because a round trip would prove nothing."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qarl.learner.batching import make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.quant.digest import StreamDigest
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import SCHEMES
from qarl.quant.types import LowBitTensor
from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.types import Completion, Group, Prompt, Sampling
from qarl.rollout.vllm.engine import VllmEngine
from qarl.sync.audit import audit, require_agreement
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher, PublishError
from tests.support import Policies
from tests.support.cases import cases
from tests.support.engines import (
    SEQUENCES,
    answers_when_fresh,
    disturb,
    make_model,
    start_engine,
)
from tests.support.kernels import AVX512
from tests.support.profiles import examples, thorough

Running = tuple[LowBitModel, VllmEngine]
Shared = tuple[LowBitModel, VllmEngine, Publisher]
PROMPTS = [Prompt(str(n), "", tuple(sequence[:20])) for n, sequence in enumerate(SEQUENCES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtype", "layers", "tied", "publishes"),
    cases(__file__, "publishes") + thorough() * cases(__file__, "more publishes"),
)
def test_publishes_equal_a_fresh_engine_bit_for_bit(
    random_policy: Policies,
    tmp_path: Path,
    scheme: str,
    dtype: str,
    layers: str,
    tied: bool,
    publishes: int,
):
    """Check that an engine answers, after publishes, as one that loaded the last weights from disk.

    A quantized head is checked too, because its kernel holds raw pointers. The engine reports the
    plan's scheme for every layer, so that another plan is reported layer by layer
    (tests/sync/test_proofs.py). Blind spot: both engines use vLLM's loading, so a fault in it shows
    in the canary only.
    """
    publishes = examples(publishes)
    folder = random_policy(tied)
    model = make_model(folder, scheme, dtype, layers=layers)
    engine = start_engine(model, folder, tmp_path / "start", dtype)
    require_agreement(audit(model.layer_reports(), engine.layer_reports(), same_kernels=True))
    assert {row.name: row.scheme for row in engine.layer_reports()} == {
        n: s.name for n, s in model.plan.schemes.items()
    }
    every = max(publishes // 2 - 1, 2)
    publisher = Publisher(model, engine, SEQUENCES, None, canary_every=every)
    publisher.share_layers()
    before = engine.logprobs(SEQUENCES)
    for version in range(1, publishes + 1):
        disturb(model, version)
        published = publisher.publish(version)
        assert (published.canary is not None) == (version % every == 1)
    assert publisher.canary(publishes).mean_abs < 0.01
    after = engine.logprobs(SEQUENCES)
    publisher.unshare_layers()
    engine.close()
    assert after != before
    assert after == answers_when_fresh(model, folder, tmp_path / "fresh", dtype)


@pytest.mark.skipif(not AVX512, reason="vLLM has no FP8 cache on such CPUs")
def test_an_fp8_cache_is_the_learners_too(random_policy: Policies, tmp_path: Path):
    """Check that an engine samples what the learner scores, to the bit, in every version.

    Only the export's configuration says that keys and values are in e4m3. Another cache gives other
    log-probs.
    """
    folder = random_policy(True)
    model = make_model(folder, "w8a8", kv_cache="fp8")
    engine = start_engine(model, folder, tmp_path / "start")
    disturb(model, 1)
    Publisher(model, engine, SEQUENCES, 0.01, 1).publish(1)
    equal = sampled_mismatch(model, engine, 1.0).equal
    rounded = engine.logprobs(SEQUENCES)
    engine.close()
    model.context.kv_cache = None
    assert equal == 1.0
    assert rounded != answers_when_fresh(model, folder, tmp_path / "fresh")


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "fp8-block"])
def test_published_and_exported_are_the_same_bytes(
    random_policy: Policies, tmp_path: Path, scheme: str
):
    """Check that published bytes are those of the export, and that it names no local folder.

    The digest of the stream equals the digest of the file read back. tests/quant/test_model.py
    checks that the forward pass multiplies them.
    """
    folder = random_policy(True)
    model = make_model(folder, scheme, kernel="reference")
    written = export_checkpoint(model, folder, tmp_path / "export")
    assert str(folder) not in (tmp_path / "export" / "config.json").read_text()
    assert {file.name for file in (tmp_path / "export").glob("model*")} == {"model.safetensors"}
    read = StreamDigest()
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as file:
        for item in model.low_bit_tensors():
            tensor = file.get_tensor(item.name)
            assert tensor.dtype == item.tensor.dtype
            read.update(LowBitTensor(item.name, tensor))
        names = set(file.keys())
    assert names == {item.name for item in model.low_bit_tensors()}
    assert read.hexdigest() == written.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "layers"), cases(__file__, "exports"))
def test_transformers_loads_the_export(
    random_policy: Policies, tmp_path: Path, scheme: str, layers: str
):
    """Check weight by weight that transformers decompresses what the learner multiplied with.

    All other tensors are as published.
    """
    folder = random_policy(False)
    model = make_model(folder, scheme, layers=layers, kernel="reference")
    export_checkpoint(model, folder, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export",
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    theirs = loaded.state_dict()
    for name, master in model.masters.items():
        low_bit = (
            linear.low_bit if (linear := model.linears.get(name.removesuffix(".weight"))) else None
        )
        ours = master.to(torch.bfloat16) if low_bit is None else low_bit.dequantized(torch.bfloat16)
        assert torch.equal(theirs[name], ours), name


@pytest.fixture(scope="module")
def running(random_policy: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = random_policy(True)
    model = make_model(folder, "w4a16", "bfloat16")
    start = tmp_path_factory.mktemp("run") / "start"
    engine = start_engine(model, folder, start, temperature=0.5, max_prompt_tokens=160)
    yield model, engine
    engine.close()


def test_changed_bytes_are_caught(running: Running, monkeypatch: pytest.MonkeyPatch):
    model, engine = running
    load = engine.load

    def flipped(stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        items = list(stream)
        items[5] = LowBitTensor(items[5].name, items[5].tensor.clone())
        items[5].tensor.view(torch.uint8).view(-1)[0] ^= 1
        return load(items, version)

    monkeypatch.setattr(engine, "load", flipped)
    with pytest.raises(PublishError, match="other bytes than were sent"):
        Publisher(model, engine, SEQUENCES, 0.05, 50).publish(7)


def test_a_tensor_left_out_is_named(running: Running):
    model, engine = running

    def report(drop: str):
        return engine.load([i for i in model.low_bit_tensors() if i.name != drop], 1)

    one_part = "model.layers.1.mlp.up_proj.weight_scale"
    assert report(one_part).missing == ("model.layers.1.mlp.gate_up_proj",)
    whole = "model.layers.0.input_layernorm.weight"
    assert report(whole).missing == ("model.layers.0.input_layernorm",)
    assert engine.load(model.low_bit_tensors(), 1).missing == ()


def test_the_canary_sees_an_engine_with_other_weights(running: Running):
    model, engine = running
    publisher = Publisher(model, engine, SEQUENCES, None, 50)
    assert publisher.canary(1).mean_abs < 1e-3
    masters = {name: master.detach().clone() for name, master in model.masters.items()}
    disturb(model, 3)
    with pytest.raises(
        PublishError, match=r"canary's mean .* above the bound .* times what two right"
    ):
        publisher.canary(2)
    with torch.no_grad():
        for name, master in model.masters.items():
            master.copy_(masters[name])
    model.refresh()
    assert publisher.canary(3).mean_abs < 1e-3


@pytest.fixture
def shared(running: Running) -> Iterator[Shared]:
    """Share the running engine's layers with the learner during the test."""
    model, engine = running
    publisher = Publisher(model, engine, SEQUENCES, None, 50)
    publisher.share_layers()
    yield model, engine, publisher
    publisher.unshare_layers()
    model.refresh()
    engine.load(model.low_bit_tensors(), 1)


def test_layers_shared_with_the_engine_compute_what_layers_of_its_own_do(
    shared: Shared,
):
    """Check equality to the bit in every version.

    A version arrives once, before the publish, and has no second copy.
    """
    model, engine, publisher = shared
    for version in (1, 2):
        disturb(model, version)
        assert engine.weight_version == version
        theirs = logits(model)
        head = multiplied_with(model)[-1]
        written = [parameter.data_ptr() for parameter in head.parameters()]
        assert publisher.publish(version).version == version
        assert written == [parameter.data_ptr() for parameter in head.parameters()]
        with model.context.own_kernels():
            assert torch.equal(logits(model), theirs)
    theirs = {id(module) for module in engine.shared_layers()._layers.values()}
    # qkv and gate_up, o and down of two layers, the head
    assert len(multiplied_with(model)) == 2 * (2 + 2) + 1
    # which have the input embedding, too
    assert {id(module) for module in multiplied_with(model)} < theirs


def logits(model: LowBitModel) -> torch.Tensor:
    tokens = torch.tensor([SEQUENCES[2]])
    with torch.no_grad():
        return model.head(model.hidden(tokens, torch.ones_like(tokens, dtype=torch.bool)))


def multiplied_with(model: LowBitModel) -> list[torch.nn.Module]:
    """Return vLLM's layers that the model holds: those of its stacks, then the others."""
    holders = [*model._layers.stacks.values(), *model.linears.values()]
    return [holder._kernel._linear for holder in holders if holder._kernel is not None]  # type: ignore[attr-defined]


def test_every_sampled_tokens_logprob_is_the_learners_to_the_last_bit(shared: Shared):
    """Check tokens that the engine decodes one by one, and the learner scores at once and packed.

    The learner uses shared layers and layers of its own. At temperatures other than 1, log-probs
    are of the distribution that was sampled from. Blind spot: other CPUs may choose products by the
    number of rows.
    """
    model, engine, publisher = shared
    disturb(model, 8)
    publisher.publish(1)
    for temperature, own in itertools.product((1.0, 0.6), (False, True)):
        with model.context.own_kernels() if own else contextlib.nullcontext():
            assert sampled_mismatch(model, engine, temperature).equal == 1.0


def sampled_mismatch(model: LowBitModel, engine: VllmEngine, temperature: float) -> Mismatch:
    sampling = Sampling(
        samples=8, max_new_tokens=24, temperature=temperature, seed=7, ignore_end=True
    )
    return mismatch_of(model, PROMPTS, engine.generate(PROMPTS, sampling), temperature)


def mismatch_of(
    model: LowBitModel,
    prompts: list[Prompt],
    answers: list[list[Completion]],
    at: float,
) -> Mismatch:
    """Return log-probs of completions that were sampled at that temperature."""
    groups = [Group(p, tuple(c), (0.0,) * len(c)) for p, c in zip(prompts, answers, strict=True)]
    batch = make_batch(groups, pad_token=0)
    with torch.no_grad():
        learner, _ = token_logprobs(
            model,
            batch.tokens,
            batch.response_mask,
            packed=batch.packed(),
            temperature=at,
        )
    return measure_mismatch(learner, batch.sampler_logprobs, batch.response_mask)


def test_stops_and_loops_end_completions(running: Running):
    """Check completions that a stop text or a loop ends.

    The tokens of a stop text are the last that are learned from, and its text is left out. A loop
    keeps as many rounds as were allowed, and its completion counts as truncated.
    """
    _, engine = running
    sampling = Sampling(samples=1, max_new_tokens=24, seed=3, ignore_end=True)
    free = engine.generate(PROMPTS[:1], sampling)[0][0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 2]
    stopped = engine.generate(PROMPTS[:1], dataclasses.replace(sampling, stop=(stop,)))[0][0]
    count = len(stopped.token_ids)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert count < 24
    assert stopped.token_ids == free.token_ids[:count]
    assert stopped.logprobs == free.logprobs[:count]
    assert stopped.finish_reason == "stop"
    assert free.truncated
    assert not stopped.truncated
    answers = engine.generate(PROMPTS, dataclasses.replace(sampling, temperature=0.0, loop_limit=2))
    looping = next(own[0] for own in answers if own[0].finish_reason == "repetition")
    tokens = looping.token_ids
    assert looping.truncated
    assert any(tokens[-n:] == tokens[-2 * n : -n] for n in range(1, 9))


def test_a_completions_text_is_vllms_own(running: Running):
    """Compare text made at the end, from all tokens, with the text that vLLM makes token by token.

    vLLM makes it so when it looks for a stop text. Some completions end in the end token, and some
    in the middle of a character.
    """
    _, engine = running
    sampling = Sampling(samples=32, max_new_tokens=24, seed=4)
    late, early = (
        [completion for group in engine.generate(PROMPTS, asked) for completion in group]
        for asked in (sampling, dataclasses.replace(sampling, stop=("never sampled",)))
    )
    assert late == early
    assert {"stop", "length"} <= {completion.finish_reason for completion in late}


def test_the_canary_sees_shared_layers_that_hold_other_weights(shared: Shared):
    """Check the case in which learner and engine agree with each other but not with the publish."""
    model, engine, publisher = shared
    before = [LowBitTensor(item.name, item.tensor.clone()) for item in model.low_bit_tensors()]
    disturb(model, 5)
    engine.load(before, 1)
    with pytest.raises(
        PublishError, match=r"canary's mean .* above the bound .* times what two right"
    ):
        publisher.canary(2)


def test_a_tensor_too_many_is_refused(shared: Shared, monkeypatch: pytest.MonkeyPatch):
    """Check a surplus tensor, which vLLM notices in mid-stream.

    An engine that took half a publish refuses to answer until the next one is complete.
    """
    model, engine, publisher = shared
    extra = LowBitTensor(
        "model.layers.7.mlp.up_proj.weight_packed", torch.zeros(2, 2, dtype=torch.int32)
    )
    stream = [*model.low_bit_tensors(), extra]
    monkeypatch.setattr(model, "low_bit_tensors", lambda: stream)
    with pytest.raises((EngineError, PublishError), match=r"layers\.7"):
        publisher.publish(7)
    with pytest.raises(EngineError, match="parts of two weight versions"):
        engine.logprobs(SEQUENCES)
    monkeypatch.undo()
    publisher.publish(8)
    assert publisher.canary(8).mean_abs < 1e-3


def test_a_version_written_by_half_is_not_sampled_from_and_the_next_repairs_it(
    shared: Shared, monkeypatch
):
    model, engine, publisher = shared
    whole = model.low_bit_tensors

    def half() -> Iterator[LowBitTensor]:
        yield from itertools.islice(whole(), 20)
        raise OSError("the link broke")

    monkeypatch.setattr(model, "low_bit_tensors", half)
    with pytest.raises(EngineError, match="the link broke"):
        disturb(model, 6)
    with pytest.raises(EngineError, match="parts of two weight versions"):
        engine.logprobs(SEQUENCES)
    monkeypatch.undo()
    model.refresh()
    assert publisher.canary(7).mean_abs < 1e-3


def test_completions_do_not_depend_on_the_cache_of_older_weights(running: Running):
    """Check that a prompt longer than a block of the cache is computed again after a publish.

    A block has 128 tokens on CPUs. Log-probs are the learner's, to the bit, and every completion
    carries its version.
    """
    model, engine = running
    tokens = torch.randint(16, 512, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt = Prompt("0", "", tuple(tokens))
    sampling = Sampling(samples=4, max_new_tokens=8, seed=5)
    engine.generate([prompt], sampling)
    disturb(model, 10)
    engine.load(model.low_bit_tensors(), 11)
    answers = engine.generate([prompt], sampling)
    assert {c.weight_version for c in answers[0]} == {11}
    assert mismatch_of(model, [prompt], answers, 1.0).equal == 1.0
