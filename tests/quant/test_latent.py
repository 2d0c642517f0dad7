"""Latent attention: bits of a token in any batch, gradients of transformers' own module."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)

from qarl.configs.errors import GraphError
from qarl.quant.graph import latent
from qarl.quant.graph.packing import Sequences, pack
from qarl.quant.kernels import latent_attention as kernel
from qarl.quant.kernels.latent_attention import LatentHeads, latent_attention
from qarl.quant.kernels.row_independence import on_threads
from qarl.quant.kernels.vllm_cpu import register
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from tests.support.kernels import no_cuda
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.tensors import seeded

pytestmark = no_cuda
H, P, R, V, L = 3, 32, 64, 48, 512
"""Heads, columns of keys, rotated columns, columns of values and of latents."""
SIZES = latent.Sizes(heads=H, columns=P, scale=(P + R) ** -0.5)
LENGTHS = [5, 70, 1, 33]
"""Tokens of each sequence: less than a block of 16, several, one, and one more than two blocks."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    register()


def drawn(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return queries, latents, rotated keys, and the transposed weight of `kv_b_proj`."""
    generator = seeded(seed)
    shapes = [(tokens, H, P + R), (tokens, L), (tokens, R), (L, H * (P + V))]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[-1] *= L**-0.5
    return [t.to(dtype) for t in tensors]


def attend(tensors: list[Tensor], lengths: list[int], seen: list[int]) -> Tensor:
    """Return the engine's values of queries whose keys are all rows of the other tensors."""
    q, latents, rotated, weight = tensors
    heads = LatentHeads(weight.T, H, P)
    keys = torch.cat([latents, rotated], dim=-1)
    return latent_attention(q, keys, heads, SIZES.scale, lengths, seen)


@pytest.mark.parametrize("least_work", [64, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_prefilled_decoded_and_on_any_threads(
    dtype: torch.dtype, least_work: int, monkeypatch: pytest.MonkeyPatch
):
    """Contract: bits agree between whole sequences (as the learner and prompts have them), a part
    whose prefix is cached, and single queries, alone and beside others (as in decoding). Queries
    are divided among threads, or all of them are computed by one.
    """
    monkeypatch.setattr(kernel, "_PART", least_work)
    tensors = drawn(sum(LENGTHS), dtype)
    together = attend(tensors, LENGTHS, LENGTHS)
    assert together.isfinite().all()
    for count in (1, 2, 4):
        again = on_threads(count, lambda: attend(tensors, LENGTHS, LENGTHS))
        assert torch.equal(again, together)
    weight = tensors.pop()
    parts = zip(*(t.split(LENGTHS) for t in (*tensors, together)), strict=True)
    for q, latents, rotated, expected in parts:
        count = len(q)
        for first in {0, 1, 17, count - 20, count - 1} & {*range(count)}:
            part = attend([q[first:], latents, rotated, weight], [count - first], [count])
            assert torch.equal(part, expected[first:])
            seen = first + 1
            decoded = [q[first:seen], latents[:seen], rotated[:seen], weight]
            assert torch.equal(attend(decoded, [1], [seen]), expected[first:seen])


@pytest.mark.parametrize(
    ("dtype", "units"),
    [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 16)],
    ids=str,
)
def test_the_formula_is_near_the_engines_values(dtype: torch.dtype, units: int):
    """The difference is that of the compute dtype, to which vLLM rounds queries and sums; in fp32
    that of sums over 512 columns.
    """
    tensors = drawn(sum(LENGTHS), dtype)
    engine = attend(tensors, LENGTHS, LENGTHS).float()
    values = latent.formula([t.float() for t in tensors], SIZES, Sequences.apart(LENGTHS))
    unit = torch.finfo(dtype).eps * values.abs().mean()
    assert (engine - values).abs().mean() < units * unit


@pytest.mark.parametrize("columns", [16, 192])
def test_the_formula_is_transformers_own(columns: int):
    """Contract: behind transformers' own projections, in fp32, the output and the gradients of
    input, `kv_b_proj` and both projections before it are those of its module, with values of fewer
    and of more columns than keys.
    """
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None}
    config = DeepseekV3Config(hidden_size=128, qk_nope_head_dim=32, v_head_dim=columns, **sizes)
    config._attn_implementation = "eager"
    theirs: Any = DeepseekV3Attention(config, 0)
    hidden = torch.randn(1, 40, 128).requires_grad_()
    cosines = DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(40)[None])
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    expected = theirs(hidden, position_embeddings=cosines, attention_mask=mask)[0]
    q = theirs.q_proj(hidden).view(1, 40, 4, 96).transpose(1, 2)
    compressed = theirs.kv_a_proj_with_mqa(hidden)
    c, k_rotated = compressed.split([512, 64], dim=-1)
    q_plain, q_rotated = q.split([32, 64], dim=-1)
    q_rotated, k_rotated = apply_rotary_pos_emb_interleave(
        q_rotated, k_rotated.view(1, 1, 40, 64), *cosines
    )
    own = latent.Sizes(heads=4, columns=32, scale=theirs.scaling)
    inputs = [
        torch.cat([q_plain, q_rotated], dim=-1)[0].transpose(0, 1),
        theirs.kv_a_layernorm(c)[0],
        k_rotated[0, 0],
        theirs.kv_b_proj.weight.T,
    ]
    y = latent.formula(inputs, own, Sequences.apart([40]))
    ours = theirs.o_proj(y.flatten(1))
    torch.testing.assert_close(ours, expected[0], rtol=1e-4, atol=1e-5)
    trained = [hidden, *theirs.parameters()]
    weights = torch.randn_like(ours)
    results = [
        torch.autograd.grad((values * weights).sum(), trained, retain_graph=True)
        for values in (ours, expected[0])
    ]
    for gradient, reference in zip(*results, strict=True):
        assert (gradient - reference).norm() < 1e-4 * reference.norm()


def test_sharing_a_prompt_changes_no_value_and_sums_its_gradients():
    """Contract: three answers to one prompt that is stored once have the values and gradients of
    three whole sequences.
    """
    length = torch.tensor([20, 50, 18])
    zero = torch.zeros(3, dtype=torch.int64)
    shared = pack(length, 50, torch.tensor([0, 17, 17]), zero)
    apart = pack(length, 50, zero, zero)
    *stored, weight = drawn(int(shared.kept.sum()), torch.bfloat16)
    places = shared.places[apart.kept]
    results = []
    for packed, index in ((shared, None), (apart, places)):
        leaves = [t.float().requires_grad_() for t in stored]
        rows = [(t if index is None else t[index]).bfloat16() for t in leaves]
        trained = weight.detach().requires_grad_()
        output = latent._Latent.apply(*rows, trained, SIZES, packed.sequences)
        whole = output if index is not None else output[places]
        loss = (whole.float() * torch.linspace(-1, 1, whole.numel()).view_as(whole)).sum()
        results.append([whole, *torch.autograd.grad(loss, [*leaves, trained])])
    assert torch.equal(results[0][0], results[1][0])
    for ours, expected in zip(results[0][1:], results[1][1:], strict=True):
        assert (ours - expected).float().norm() < 0.01 * expected.float().norm()


@pytest.mark.parametrize("page", [16, 128])
def test_the_engines_plan_is_one_request_a_token_in_pages_of_16(page: int):
    """Contract: a batch of a prompt of 20 tokens, one whose first 30 are cached, and one that is
    decoded has the bits of whole sequences. Pages of 128 tokens are those of CPUs with AMX.
    """
    from qarl.quant.kernels.vllm_cpu.latent import TokenImpl, TokenMetadataBuilder

    seen, queries = [20, 45, 33], [20, 15, 1]
    *rows, weight = drawn(sum(seen), torch.bfloat16)
    expected = attend([*rows, weight], seen, seen)
    ends = torch.tensor(seen).cumsum(0).tolist()
    asked = torch.cat(
        [torch.arange(end - count, end) for end, count in zip(ends, queries, strict=True)]
    )
    cache = torch.randn(40, page, L + R, generator=seeded(1)).bfloat16()
    pages = torch.randperm(40, generator=seeded(2))[:12].view(3, 4)
    starts = [end - count for end, count in zip(ends, seen, strict=True)]
    for table, start, count in zip(pages, starts, seen, strict=True):
        for token in range(count):
            key = torch.cat([rows[1][start + token], rows[2][start + token]])
            cache[table[token // page], token % page] = key
    builder: Any = object.__new__(TokenMetadataBuilder)
    builder.kv_cache_spec = SimpleNamespace(block_size=page)
    batch = SimpleNamespace(
        causal=True,
        num_reqs=3,
        query_start_loc=torch.tensor([0, 20, 35, 36, 36]),  # padded
        seq_lens=torch.tensor([*seen, 0]),
        block_table_tensor=torch.cat([pages, pages[:1]]).int(),
    )
    plan = builder.build(0, batch)
    assert plan.num_actual_tokens == 36
    assert plan.num_prefills == 3
    impl: Any = object.__new__(TokenImpl)
    impl.heads = LatentHeads(weight.T, H, P)
    impl.scale = SIZES.scale
    output = torch.empty(36, H * V, dtype=torch.bfloat16)
    unused = torch.empty(0)
    impl.forward_mha(rows[0][asked], unused, unused, cache, plan, unused, output)
    assert torch.equal(output, expected[asked].flatten(1))


def test_an_fp8_cache_is_refused():
    context = LayerContext(torch.bfloat16, "vllm", kv_cache="fp8")
    with pytest.raises(GraphError, match=r"kv_cache 'fp8' with latent attention.*omit it"):
        LowBitModel(random_moe(CONFIGS["deepseek_v3"]), get_scheme("w8a8"), context, "engine")


def test_latent_attention_is_asked_whether_rows_depend_on_others():
    model = LowBitModel(
        random_moe(CONFIGS["deepseek_v3"]),
        get_scheme("w8a8"),
        LayerContext(torch.bfloat16, "vllm"),
        "engine",
    )
    check = model.check_rows()
    assert not check.dependent
