"""Latent attention in the real engine: every sampled token has the learner's bits, in any batch."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.family_models import write_model
from qarl.learner.batching import Batch, make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.quant.graph.packing import Packed
from qarl.quant.kernels.row_independence import on_threads
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.rollout.vllm.engine import VllmEngine
from tests.support.engines import disturb, make_model, start_engine
from tests.support.kernels import no_cuda
from tests.support.tensors import seeded

pytestmark = [pytest.mark.slow, no_cuda]
LENGTHS = (3, 40, 150)
"""Tokens of prompts: less than the kernel's block of 16 keys, and several blocks."""
NEW = 40
"""Tokens of a completion: it crosses blocks."""
Running = tuple[LowBitModel, VllmEngine]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A learner and its engine, which has taken a publish since it loaded its weights."""
    folder = tmp_path_factory.mktemp("latent")
    write_model("deepseek-v3", folder)
    model = make_model(folder, "w8a8", request.param)
    assert model.operators == "engine"
    engine = start_engine(
        model,
        folder,
        folder / "start",
        request.param,
        max_prompt_tokens=256,
        max_new_tokens=NEW,
    )
    disturb(model, 1)
    engine.load(model.low_bit_tensors(), 1)
    yield model, engine
    engine.close()


def sampled(engine: VllmEngine, prompts: list[list[int]], samples: int = 1) -> Batch:
    """Return completions of prompts."""
    asked = [Prompt(str(number), "", tuple(tokens)) for number, tokens in enumerate(prompts)]
    completions = engine.generate(asked, Sampling(samples, NEW, seed=0, ignore_end=True))
    pairs = zip(asked, completions, strict=True)
    groups = [Group(prompt, tuple(answers), (1.0,) * samples) for prompt, answers in pairs]
    return make_batch(groups, pad_token=0)


def scores(model: LowBitModel, batch: Batch, packed: Packed | None) -> torch.Tensor:
    return token_logprobs(model, batch.tokens, batch.response_mask, packed=packed, entropy=False)[0]


def drawn(length: int) -> list[int]:
    return torch.randint(16, 500, (length,), generator=seeded(length)).tolist()


def test_sampled_tokens_have_the_learners_bits_in_any_arrangement(running: Running):
    """Contract: prompts of several lengths, two completions each, sampled together; scored padded,
    packed, with a prompt that is stored once, and each alone, on one thread and on two.
    """
    model, engine = running
    batch = sampled(engine, [drawn(length) for length in LENGTHS], samples=2)
    mask = batch.response_mask
    assert mask.sum() == 2 * len(LENGTHS) * NEW
    expected = batch.sampler_logprobs[mask]
    for packed in (None, batch.packed(), batch.packed(share_prompts=True)):
        for count in (1, 2):
            ours = on_threads(count, lambda packed=packed: scores(model, batch, packed))
            assert torch.equal(ours[mask], expected)
    with torch.no_grad():
        for row, length in enumerate(batch.length.tolist()):
            tokens, wanted = batch.tokens[row : row + 1, :length], mask[row : row + 1, : length - 1]
            ours = token_logprobs(model, tokens, wanted, entropy=False)[0]
            assert torch.equal(ours[wanted], batch.sampler_logprobs[row, : length - 1][wanted[0]])


def test_a_sequence_that_is_sampled_alone_has_the_learners_bits(running: Running):
    model, engine = running
    batch = sampled(engine, [drawn(70)])
    mask = batch.response_mask
    for count in (1, 2):
        ours = on_threads(count, lambda: scores(model, batch, batch.packed()))
        assert torch.equal(ours[mask], batch.sampler_logprobs[mask])


def test_tokens_have_the_same_bits_sampled_and_as_a_later_turns_prompt(running: Running):
    """Contract: a conversation's second turn, whose prompt holds tokens that were sampled one by
    one, is scored in one forward with the bits of both turns. So is a prompt as a whole.
    """
    model, engine = running
    first = sampled(engine, [drawn(40)])
    conversation = first.tokens[0].tolist()
    second = sampled(engine, [[*conversation, *drawn(9)]])
    with torch.no_grad():
        whole = torch.ones_like(second.response_mask)
        ours = token_logprobs(model, second.tokens, whole, entropy=False)[0][0]
    turn = first.response_mask[0].nonzero().flatten()
    assert torch.equal(ours[turn], first.sampler_logprobs[0, turn])
    turn = second.response_mask[0].nonzero().flatten()
    assert torch.equal(ours[turn], second.sampler_logprobs[0, turn])
    assert engine.logprobs([second.tokens[0].tolist()])[0] == ours.tolist()
