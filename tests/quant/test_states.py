"""Tests of layers with a state (gated delta nets, Mamba-2, short convolutions): vLLM's values by
token and batch, and gradients against transformers. tests/engine/test_families.py compares with
what an engine samples.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteMoeHybridConfig, Lfm2Config, Qwen3NextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from qarl.configs.errors import GraphError, QarlError
from qarl.configs.load import load_config
from qarl.preflight.support import require_states
from qarl.quant.graph import convolution, delta_net, mamba2
from qarl.quant.graph.convolution import SHORT_CONVOLUTION
from qarl.quant.graph.packing import Sequences, known, pack, pack_prompts, prefilled_tokens
from qarl.quant.graph.skeleton import build_skeleton
from qarl.quant.graph.states import Recurrence
from qarl.quant.kernels.row_independence import on_threads
from tests.support.kernels import no_cuda
from tests.support.tensors import seeded

pytestmark = no_cuda
LENGTHS = (1, 70, 5, 200, 130)
PREFILLED = (1, 64, 2, 200, 33)
CHANNELS = 96
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
HYBRID = GraniteMoeHybridConfig(
    **SIZES,
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_n_groups=2,
    mamba_d_state=24,
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=64,
    max_position_embeddings=256,
    position_embedding_type="rope",
)
DELTA_NETS = Qwen3NextConfig(
    **SIZES,
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
CONVOLUTIONS = Lfm2Config(
    vocab_size=96,
    hidden_size=CHANNELS,
    layer_types=["conv"],
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@pytest.fixture(scope="module")
def mixer() -> Any:
    """vLLM's module of a Mamba-2 layer, without weights."""
    kind = "GraniteMoeHybridForCausalLM"
    skeleton = build_skeleton(HYBRID, kind, None, torch.bfloat16, torch.device("cpu"))
    return skeleton.module.get_submodule("model.layers.0.mamba")


@pytest.fixture(scope="module")
def net() -> Any:
    """vLLM's module of a gated delta net, without weights."""
    kind = "Qwen3NextForCausalLM"
    skeleton = build_skeleton(DELTA_NETS, kind, None, torch.bfloat16, torch.device("cpu"))
    return skeleton.module.get_submodule("model.layers.0.linear_attn")


@pytest.fixture(params=["short convolution", "wider convolution", "Mamba-2", "delta net"])
def layer(request: pytest.FixtureRequest) -> tuple[Recurrence, list[int], list[tuple[int, ...]]]:
    """A layer's recurrence, the columns of its inputs, and the shapes of its weights."""
    if request.param.endswith("convolution"):
        width = 3 if request.param.startswith("short") else 4
        return SHORT_CONVOLUTION, [3 * CHANNELS], [(CHANNELS, 1, width), (CHANNELS,)]
    if request.param == "Mamba-2":
        mixer = request.getfixturevalue("mixer")
        heads, channels = mixer.num_heads, mixer.conv_dim
        shapes = [(channels, 1, 4), (channels,), (heads,), (heads,), (heads,)]
        return mamba2.recurrence_of(mixer), [channels + heads], shapes
    net = request.getfixturevalue("net")
    heads, channels = net.num_v_heads, net.conv_dim
    shapes = [(channels, 1, net.conv_kernel_size), (heads,), (heads,)]
    return delta_net.recurrence_of(net), [channels, heads, heads], shapes


def drawn(
    columns: Sequence[int], shapes: Sequence[tuple[int, ...]], tokens: int, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs of all tokens, and weights, in bfloat16 but for the decay."""
    generator = seeded(seed)
    rows = [torch.randn(tokens, c, generator=generator).bfloat16() for c in columns]
    weights = [0.5 * torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    if len(weights) > 2:
        decay = 1 if len(weights) == 3 else 2  # of delta nets and Mamba-2
        weights[decay] = weights[decay].float()
    return rows, weights


def test_a_token_has_the_same_bits_beside_other_sequences_and_on_one_thread(layer: Any):
    """Contract: values depend on the sequence's own past and on where its prompt ended, alone."""
    recurrence, columns, shapes = layer
    rows, weights = drawn(columns, shapes, sum(LENGTHS))
    together = recurrence.values(rows, weights, LENGTHS, PREFILLED)
    assert together.isfinite().all()
    sequences = zip(*(t.split(LENGTHS) for t in rows), strict=True)
    parts = zip(sequences, LENGTHS, PREFILLED, strict=True)
    alone = [recurrence.values(part, weights, [n], [p]) for part, n, p in parts]
    assert torch.equal(together, torch.cat(alone))
    threads = on_threads(1, lambda: recurrence.values(rows, weights, LENGTHS, PREFILLED))
    assert torch.equal(together, threads)


def test_a_prompt_has_the_same_bits_whatever_follows(layer: Any):
    """Contract: later tokens do not change earlier ones, and rounding alone tells a prompt's values
    from sampled tokens'.
    """
    recurrence, columns, shapes = layer
    rows, weights = drawn(columns, shapes, 200)
    whole = recurrence.values(rows, weights, [200], [200])
    sampled = recurrence.values(rows, weights, [200], [64])
    assert torch.equal(whole[:64], sampled[:64])
    assert (whole - sampled).abs().max() < 0.05 * whole.abs().max()


def test_delta_nets_after_the_prompt_have_the_values_of_vllms_own_steps(net: Any):
    """Contract: computing all convolutions in one call changes no bit of vLLM's own Python, which
    computes each step's. Blind spot: CPUs whose bfloat16 units vLLM convolves with, if the tests
    run without them.
    """
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _cpu_gdn_attention_nonspec
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    tokens, prompt = 70, 2  # shorter than the convolution is wide
    rows, weights = drawn(
        [net.conv_dim, net.num_v_heads, net.num_v_heads],
        [(net.conv_dim, 1, net.conv_kernel_size), (net.num_v_heads,), (net.num_v_heads,)],
        tokens,
    )
    layer = delta_net._Layer(net, weights, 1)

    def step(first: int, last: int, decode: int) -> Tensor:
        """Return vLLM's values of these tokens, as one prompt or as one decoded token."""
        count = last - first
        metadata = GDNAttentionMetadata(
            num_prefills=1 - decode,
            num_prefill_tokens=count * (1 - decode),
            num_decodes=decode,
            num_decode_tokens=decode,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=count,
            has_initial_state=torch.zeros(1, dtype=torch.bool),
            non_spec_query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            non_spec_state_indices_tensor=torch.ones(1, dtype=torch.int32),
        )
        values = torch.zeros(count, net.num_v_heads, net.head_v_dim, dtype=torch.bfloat16)
        mixed, b, a = (t[first:last] for t in rows)
        _cpu_gdn_attention_nonspec(layer, metadata, mixed, b, a, values)
        return values

    steps = [step(0, prompt, 0), *(step(n, n + 1, 1) for n in range(prompt, tokens))]
    values = delta_net.recurrence_of(net).values(rows, weights, [tokens], [prompt])
    assert torch.equal(values, torch.cat(steps))


def test_the_formula_is_near_the_engines_values(layer: Any):
    """The difference is that of bfloat16: vLLM rounds the convolution's result and states to it."""
    recurrence, columns, shapes = layer
    rows, weights = drawn(columns, shapes, 150)
    engine = recurrence.values(rows, weights, [150], [70]).float()
    values = recurrence.formula([t.float() for t in rows], [w.float() for w in weights])
    assert (engine - values).abs().mean() < 0.01 * values.abs().mean()


@pytest.mark.parametrize("kind", ["Mamba-2", "delta net"])
def test_chunks_are_the_recurrence(kind: str):
    """Contract: values and all gradients, in fp64, at lengths that fill no chunk, one, and two."""
    for tokens in (1, 63, 64, 130):
        generator = seeded(tokens)

        def draw(*shape: int, generator=generator) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        decay = -draw(3, tokens).exp()
        values = draw(3, tokens, 16)
        keys, queries = draw(3, tokens, 8), draw(3, tokens, 8)
        if kind == "Mamba-2":
            functions = (mamba2.scan, scan)
            inputs = [values, keys, queries, decay]
        else:
            functions = (delta_net.delta_rule, delta_rule)
            keys, queries = (nn.functional.normalize(t, dim=-1) for t in (keys, queries))
            inputs = [queries, keys, values, decay, draw(3, tokens).sigmoid()]
        inputs = [t.requires_grad_() for t in inputs]
        weights = draw(3, tokens, 16)
        results = []
        for function in functions:
            output = function(*inputs)
            results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def scan(x: Tensor, b: Tensor, c: Tensor, g: Tensor) -> Tensor:
    """Return the outputs of Mamba-2's recurrence, token by token."""
    state = x.new_zeros(x.shape[0], x.shape[2], b.shape[2])
    outputs = []
    for t in range(x.shape[1]):
        state = state * g[:, t, None, None].exp() + torch.einsum("hp,hd->hpd", x[:, t], b[:, t])
        outputs.append(torch.einsum("hpd,hd->hp", state, c[:, t]))
    return torch.stack(outputs, dim=1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of the gated delta rule, token by token."""
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, None, None].exp()
        error = v[:, t] - torch.einsum("hdu,hd->hu", state, k[:, t])
        state = state + torch.einsum("hd,hu->hdu", k[:, t], beta[:, t, None] * error)
        outputs.append(torch.einsum("hdu,hd->hu", state, q[:, t]))
    return torch.stack(outputs, dim=1)


def test_the_formula_of_mamba2_is_transformers_own(mixer: Any):
    """Contract: behind transformers' own projections, in fp32, the output and the gradients of
    input, convolution, decay, skip and bias are those of its module.
    """
    torch.manual_seed(0)
    theirs = GraniteMoeHybridMambaLayer(HYBRID, 0).float().eval()
    with torch.no_grad():
        for parameter in (theirs.norm.weight, theirs.D, theirs.dt_bias, theirs.A_log):
            parameter.add_(0.3 * torch.randn_like(parameter))
    hidden = torch.randn(1, 100, HYBRID.hidden_size).requires_grad_()
    convolved = theirs.conv1d.weight, theirs.conv1d.bias
    trained = [hidden, *convolved, theirs.A_log, theirs.D, theirs.dt_bias]
    projected = theirs.in_proj(hidden[0])
    gate, rest = projected.split([mixer.intermediate_size, mixer.conv_dim + mixer.num_heads], -1)
    scanned = mamba2.formula(mixer, [rest], trained[1:])
    ours = theirs.out_proj(theirs.norm(scanned, gate))
    same_values_and_gradients(ours, theirs(hidden)[0], trained)


def test_the_formula_of_delta_nets_is_transformers_own(net: Any):
    """Contract: behind transformers' own projections, in fp32, the output and the gradients of
    input, convolution, decay and bias are those of its module.
    """
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(DELTA_NETS, 0).float()
    with torch.no_grad():
        theirs.norm.weight.normal_(1.0, 0.1)
        theirs.dt_bias.normal_()
    hidden = torch.randn(1, 100, DELTA_NETS.hidden_size).requires_grad_()
    trained = [hidden, theirs.conv1d.weight, theirs.A_log, theirs.dt_bias]
    projected = theirs.in_proj_qkvz(hidden[0]), theirs.in_proj_ba(hidden[0])
    *qkv, z, b, a = net.fix_query_key_value_ordering(*projected)
    mixed = torch.cat([part.flatten(1) for part in qkv], dim=-1)
    core = delta_net.formula(net, [mixed, b, a], trained[1:])
    ours = theirs.out_proj(theirs.norm(core.flatten(0, 1), z.flatten(0, 1)).view(100, -1))
    same_values_and_gradients(ours, theirs(hidden)[0], trained)


def test_the_formula_of_short_convolutions_is_transformers_own():
    """Contract: behind transformers' own projections, in fp32, output and gradients are those of
    its module.
    """
    torch.manual_seed(0)
    theirs = Lfm2ShortConv(CONVOLUTIONS, 0).float()
    hidden = torch.randn(1, 50, CHANNELS).requires_grad_()
    gated = convolution.gated_formula([theirs.in_proj(hidden[0])], [theirs.conv.weight, None])
    trained = [hidden, *theirs.parameters()]
    same_values_and_gradients(theirs.out_proj(gated), theirs(hidden)[0], trained)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_convolutions_give_prompts_the_bits_of_sampled_tokens(dtype: torch.dtype, width: int):
    """Contract: values do not depend on where the prompt ended, so conversations are exact."""
    assert convolution.same_bits(width, dtype)
    rows, weights = drawn([3 * CHANNELS], [(CHANNELS, 1, width)], sum(LENGTHS), seed=1)
    rows, weights = [rows[0].to(dtype)], [weights[0].to(dtype), None]
    values = [
        convolution.gated_values(rows, weights, LENGTHS, prefilled)
        for prefilled in (LENGTHS, PREFILLED, (1,) * len(LENGTHS))
    ]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


def test_mamba2_needs_to_know_where_the_prompt_ended(mixer: Any):
    layer = mamba2.recurrence_of(mixer)
    with pytest.raises(GraphError, match=r"has Mamba-2 layers, which.*several turns.*operators"):
        layer(Sequences.apart([3]), [], [])


def test_sharing_a_prompt_changes_no_value_and_sums_its_gradients(layer: Any):
    """Contract: three answers to one prompt that is stored once have the values and gradients of
    three whole sequences. A masked answer may bring the prompt.
    """
    recurrence, columns, shapes = layer
    prompt = torch.tensor([7, 7, 7])
    length = torch.tensor([20, 90, 8])
    token = torch.arange(1, 90)[None]
    mask = (token >= prompt[:, None]) & (token < length[:, None])
    mask[0] = False
    prefilled = prefilled_tokens(mask, length)
    assert prefilled.tolist() == [20, 7, 7]
    zero = torch.zeros(3, dtype=torch.int64)
    shared = pack(length, 90, torch.tensor([0, 7, 7]), zero, prefilled)
    apart = pack(length, 90, zero, zero, prefilled)
    stored, weights = drawn(columns, shapes, int(shared.kept.sum()))
    places = shared.places[apart.kept]
    results = []
    for packed, index in ((shared, None), (apart, places)):
        leaves = [t.float().requires_grad_() for t in stored]
        rows = [(t if index is None else t[index]).bfloat16() for t in leaves]
        trained = [w.detach().requires_grad_() for w in weights]
        output = recurrence(packed.sequences, rows, trained)
        whole = output if index is not None else output[places]
        loss = (whole.float() * torch.linspace(-1, 1, whole.numel()).view_as(whole)).sum()
        results.append([whole, *torch.autograd.grad(loss, [*leaves, *trained])])
    assert torch.equal(results[0][0], results[1][0])
    for ours, expected in zip(results[0][1:], results[1][1:], strict=True):
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
    ("model", "flags", "message"),
    [
        (HYBRID, {}, ""),
        (HYBRID, {"dtype": "float32"}, ""),
        (HYBRID, {"rollout.servers": "[http://localhost:1]"}, "rollout.servers.*Mamba-2.*operat"),
        (HYBRID, {"task.environment": "mine.py:Shop"}, "several turns.*Mamba-2 layers.*operators"),
        (HYBRID, {"task.rollout": "m.py:f", "learner.operators": "transformers"}, ""),
        (CONVOLUTIONS, {"task.environment": "mine.py:Shop"}, ""),
        (CONVOLUTIONS, {"rollout.servers": "[http://localhost:1]"}, ""),
        (
            CONVOLUTIONS,
            {"task.environment": "mine.py:Shop", "dtype": "float32"},
            "several turns.*short convolutions.*operators",
        ),
        (
            Lfm2Config(layer_types=["conv"], num_hidden_layers=1, conv_L_cache=5),
            {"task.environment": "mine.py:Shop", "dtype": "float16"},
            "several turns.*short convolutions.*operators",
        ),
        (DELTA_NETS, {}, ""),
        (DELTA_NETS, {"rollout.servers": "[http://localhost:1]"}, "rollout.servers.*operators"),
        (DELTA_NETS, {"task.environment": "mine.py:Shop"}, "several turns.*operators"),
        (DELTA_NETS, {"task.rollout": "m.py:f", "learner.operators": "transformers"}, ""),
        (DELTA_NETS, {"dtype": "float32"}, "'float32'.*set dtype to bfloat16"),
        (
            DELTA_NETS,
            {"dtype": "float16", "learner.operators": "transformers"},
            "set dtype to bfloat16",
        ),
    ],
)
def test_a_run_that_could_not_be_exact_is_refused_by_name(
    model: Any, flags: dict[str, str], message: str
):
    config = load_config(None, {"model": "m", **flags})
    if not message:
        require_states(config, model)
        return
    with pytest.raises(QarlError, match=message):
        require_states(config, model)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (32, 64, "keys of 32 and values of 64.*need 64 or 128"),
        (96, 96, "need 64 or 128"),
        (128, 128, ""),
    ],
)
def test_delta_nets_of_sizes_without_a_kernel_are_refused(keys: int, values: int, message: str):
    sizes = {"linear_key_head_dim": keys, "linear_value_head_dim": values}
    model = Qwen3NextConfig(**{**DELTA_NETS.to_dict(), **sizes})
    config = load_config(None, {"model": "m"})
    if not message:
        require_states(config, model)
        return
    with pytest.raises(QarlError, match=message):
        require_states(config, model)


def same_values_and_gradients(ours: Tensor, expected: Tensor, trained: Sequence[Tensor]) -> None:
    """Assert that two outputs and their gradients are equal but for rounding in fp32."""
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    results = [torch.autograd.grad((y * weights).sum(), trained) for y in (ours, expected)]
    for gradient, reference in zip(*results, strict=True):
        assert (gradient - reference).norm() < 1e-4 * reference.norm()
