"""Tests of gated delta nets: vLLM's values by token and batch, and gradients against transformers.
tests/engine/test_families.py compares with what an engine samples.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from qarl.configs.errors import QarlError
from qarl.configs.load import load_config
from qarl.preflight.support import require_states
from qarl.quant.graph.delta_net import delta_rule, engine_core, formula, recurrence_of
from qarl.quant.graph.packing import Sequences, known, pack, pack_prompts, prefilled_tokens
from qarl.quant.graph.skeleton import build_skeleton
from qarl.quant.kernels.row_independence import on_threads
from tests.support.kernels import no_cuda
from tests.support.tensors import seeded

pytestmark = no_cuda
LENGTHS = (1, 70, 5, 200, 130)
PREFILLED = (1, 64, 2, 200, 33)
CONFIG = Qwen3NextConfig(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    max_position_embeddings=256,
)


@pytest.fixture(scope="module")
def layer() -> Any:
    """vLLM's module of a gated delta net, without weights."""
    kind = "Qwen3NextForCausalLM"
    skeleton = build_skeleton(CONFIG, kind, None, torch.bfloat16, torch.device("cpu"))
    return skeleton.module.get_submodule("model.layers.0.linear_attn")


def drawn(
    layer: Any,
    tokens: int,
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs of all tokens, and weights, as `engine_core` takes them."""
    generator = seeded(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    heads = layer.num_v_heads
    rows = [
        draw(tokens, layer.conv_dim),
        draw(tokens, heads),
        draw(tokens, heads),
    ]
    convolution = draw(layer.conv_dim, 1, layer.conv_kernel_size) * 0.5
    return rows, [convolution, draw(heads).float(), draw(heads)]


def test_a_token_has_the_same_bits_beside_other_sequences_and_on_one_thread(layer: Any):
    """Contract: values depend on the sequence's own past and on where its prompt ended, alone."""
    rows, weights = drawn(layer, sum(LENGTHS))
    together = engine_core(layer, rows, weights, LENGTHS, PREFILLED)
    assert together.isfinite().all()
    parts = zip(
        zip(*(t.split(LENGTHS) for t in rows), strict=True), LENGTHS, PREFILLED, strict=True
    )
    alone = [engine_core(layer, part, weights, [n], [p]) for part, n, p in parts]
    assert torch.equal(together, torch.cat(alone))
    threads = on_threads(1, lambda: engine_core(layer, rows, weights, LENGTHS, PREFILLED))
    assert torch.equal(together, threads)


def test_a_prompt_has_the_same_bits_whatever_follows_but_not_those_of_sampled_tokens(layer: Any):
    rows, weights = drawn(layer, 200)
    whole = engine_core(layer, rows, weights, [200], [200])
    sampled = engine_core(layer, rows, weights, [200], [64])
    assert torch.equal(whole[:64], sampled[:64])
    assert not torch.equal(whole[64:], sampled[64:])
    assert (whole - sampled).abs().max() < 0.05 * whole.abs().max()


def test_the_formula_is_near_the_engines_values(layer: Any):
    """The difference is that of bfloat16: vLLM rounds the convolution's result to it."""
    rows, weights = drawn(layer, 150)
    engine = engine_core(layer, rows, weights, [150], [70]).float()
    values = formula(
        layer,
        [t.float() for t in rows],
        [w.float() for w in weights],
    )
    assert (engine - values).abs().mean() < 0.01 * values.abs().mean()


def test_the_delta_rule_is_its_recurrence():
    """Contract: values and all gradients, in fp64, at lengths that fill no chunk, one, and two."""
    for tokens in (1, 63, 64, 130):
        generator = seeded(tokens)

        def draw(*shape: int, generator=generator) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        keys, queries = (nn.functional.normalize(draw(3, tokens, 8), dim=-1) for _ in range(2))
        inputs = [
            queries,
            keys,
            draw(3, tokens, 16),
            -draw(3, tokens).exp(),
            draw(3, tokens).sigmoid(),
        ]
        inputs = [t.requires_grad_() for t in inputs]
        weights = draw(3, tokens, 16)
        results = []
        for function in (delta_rule, recurrence):
            output = function(*inputs)
            results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
) -> Tensor:
    """Return the outputs of the gated delta rule, token by token."""
    state = q.new_zeros(
        q.shape[0],
        q.shape[2],
        v.shape[2],
    )
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, None, None].exp()
        error = v[:, t] - torch.einsum("hdu,hd->hu", state, k[:, t])
        state = state + torch.einsum("hd,hu->hdu", k[:, t], beta[:, t, None] * error)
        outputs.append(torch.einsum("hdu,hd->hu", state, q[:, t]))
    return torch.stack(outputs, dim=1)


def test_the_formula_is_transformers_own(layer: Any):
    """Contract: behind transformers' own projections, in fp32, the output and the gradients of
    input, convolution, decay and bias are those of its module.
    """
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(CONFIG, 0).float()
    with torch.no_grad():
        theirs.norm.weight.normal_(1.0, 0.1)
        theirs.dt_bias.normal_()
    hidden = torch.randn(1, 100, CONFIG.hidden_size).requires_grad_()
    trained = [hidden, theirs.conv1d.weight, theirs.A_log, theirs.dt_bias]
    projected = theirs.in_proj_qkvz(hidden[0]), theirs.in_proj_ba(hidden[0])
    *qkv, z, b, a = layer.fix_query_key_value_ordering(*projected)
    mixed = torch.cat([part.flatten(1) for part in qkv], dim=-1)
    core = formula(layer, [mixed, b, a], trained[1:])
    ours = theirs.out_proj(theirs.norm(core.flatten(0, 1), z.flatten(0, 1)).view(100, -1))
    expected = theirs(hidden)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    results = [torch.autograd.grad((y * weights).sum(), trained) for y in (ours, expected)]
    for gradient, reference in zip(*results, strict=True):
        assert (gradient - reference).norm() < 1e-4 * reference.norm()


def test_sharing_a_prompt_changes_no_value_and_sums_its_gradients(layer: Any):
    """Contract: three answers to one prompt that is stored once have the values and gradients of
    three whole sequences. A masked answer may bring the prompt.
    """
    prompt = torch.tensor([7, 7, 7])
    length = torch.tensor([20, 90, 8])
    mask = torch.arange(1, 90)[None].expand(3, -1) >= prompt[:, None]
    mask = mask & (torch.arange(1, 90)[None] < length[:, None])
    mask[0] = False
    prefilled = prefilled_tokens(mask, length)
    assert prefilled.tolist() == [20, 7, 7]
    zero = torch.zeros(3, dtype=torch.int64)
    leader = torch.zeros(3, dtype=torch.int64)
    shared = pack(length, 90, torch.tensor([0, 7, 7]), leader, prefilled)
    apart = pack(length, 90, zero, leader, prefilled)
    stored, weights = drawn(layer, int(shared.kept.sum()))
    places = shared.places[apart.kept]
    results = []
    for packed, index in ((shared, None), (apart, places)):
        leaves = [t.float().requires_grad_() for t in stored]
        rows = [(t if index is None else t[index]).bfloat16() for t in leaves]
        trained = [w.detach().requires_grad_() for w in weights]
        output = recurrence_of(layer)(packed.sequences, rows, trained)
        whole = output if index is not None else output[places]
        loss = (whole.float() * torch.linspace(-1, 1, whole.numel()).view_as(whole)).sum()
        results.append([whole, *torch.autograd.grad(loss, [*leaves, *trained])])
    assert torch.equal(results[0][0], results[1][0])
    for ours, expected in zip(
        results[0][1:],
        results[1][1:],
        strict=True,
    ):
        assert (ours - expected).float().norm() < 0.01 * expected.float().norm()


def test_conversations_and_rows_without_a_mask_have_an_unknown_prompt():
    sampled = torch.tensor(
        [[False, True, True, False], [True, False, True, False], [False] * 4, [False, True] * 2]
    )
    prefilled = prefilled_tokens(sampled, torch.tensor([4, 4, 3, 5]))
    assert prefilled.tolist() == [2, -1, 3, -1]
    assert known(prefilled.tolist()) is None
    assert known([2, 3]) == (2, 3)
    assert Sequences.apart([3]).prefilled is None
    assert pack_prompts(torch.tensor([4, 2]), 4).sequences.prefilled == (4, 2)


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        ({}, {}, ""),
        ({"rollout.servers": "[http://localhost:1]"}, {}, "rollout.servers.*operators"),
        ({"task.environment": "mine.py:Shop"}, {}, "several turns.*operators"),
        ({"task.rollout": "m.py:f", "learner.operators": "transformers"}, {}, ""),
        ({"dtype": "float32"}, {}, "'float32'.*set dtype to bfloat16"),
        ({"dtype": "float16", "learner.operators": "transformers"}, {}, "set dtype to bfloat16"),
        ({}, {"linear_key_head_dim": 32}, "keys of 32 and values of 64.*need 64 or 128"),
        ({}, {"linear_key_head_dim": 96, "linear_value_head_dim": 96}, "need 64 or 128"),
        ({}, {"linear_key_head_dim": 128, "linear_value_head_dim": 128}, ""),
    ],
)
def test_a_run_that_could_not_be_exact_is_refused_by_name(
    flags: dict[str, str], changes: dict[str, int], message: str
):
    config = load_config(None, {"model": "m", **flags})
    sizes = Qwen3NextConfig(**{**CONFIG.to_dict(), **changes})
    if not message:
        require_states(config, sizes)
        return
    with pytest.raises(QarlError, match=message):
        require_states(config, sizes)
