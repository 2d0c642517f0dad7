"""Tests that a token's bits depend only on its own past, at shapes of real models, with random
weights, on one, two and four threads.

These tests draw layers, not models, to stay quick. tests/runs/test_real_model.py has a whole real
model.
"""

from typing import Any

import pytest
import torch
import vllm.envs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from qarl.configs.schemes import SCHEME_SPECS
from qarl.quant.kernels import cpu_attention as attention
from qarl.quant.kernels.base import Scoring
from qarl.quant.kernels.row_independence import (
    ROWS_TESTED,
    cancelling_inputs,
    find_dependence,
    on_threads,
)
from qarl.quant.kernels.vllm import VllmFactory
from qarl.quant.kernels.vllm_cpu import register
from qarl.quant.materialize import materialize
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from qarl.sync.audit import AuditError, require_equal_rows
from tests.support.kernels import (
    AVX512,
    CPU_SCHEMES,
    attention_depends_on_requests,
    no_cuda,
)
from tests.support.models import low_bit, qwen3
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.profiles import examples
from tests.support.tensors import heavy, normal, seeded

pytestmark = no_cuda

COLUMNS = (576, 960, 1024, 1152, 1536, 2048, 2560, 3072, 4096, 8192)
ROWS_OUT = (64, 192, 576, 1024, 1536, 4096, 9728, 14336)
WORDS = (49_152, 151_936)
ELEMENTS = 1 << 23
"""Number of elements of the largest drawn weight. Larger ones take longer and show nothing more."""
HEADS = (
    (9, 3, 64),
    (12, 2, 128),
    (14, 2, 64),
    (16, 16, 64),
    (28, 4, 128),
    (4, 1, 256),
    (8, 4, 96),
    (8, 4, 80),
)
"""Query heads, key heads and head size. Some share a key head between 7 and 16 query heads."""


DTYPES = ("bfloat16", "float16", "float32")


def test_keys_are_not_split_over_threads():
    """Contract: the setting that vLLM's builder of every batch reads is off.
    tests/runs/test_real_model.py shows that it matters.
    """
    register()
    assert vllm.envs.VLLM_CPU_ATTN_SPLIT_KV is False


@given(
    st.sampled_from(CPU_SCHEMES),
    st.sampled_from(DTYPES),
    st.sampled_from(COLUMNS),
    st.sampled_from(ROWS_OUT),
)
@settings(max_examples=examples(48))
def test_a_row_is_multiplied_alike_beside_any_rows_and_on_any_threads(
    scheme: str, dtype: str, columns: int, rows: int
):
    """Contract: a row has the same bits among 1, 2, 3, 7, 64 and 400 rows, on
    1, 2 and 4 threads.
    """
    assume(columns * rows <= ELEMENTS and SCHEME_SPECS[scheme].fits((rows, columns)))
    # vLLM's int4 kernel on CPUs has no float32
    assume(dtype != "float32" or "w4a16" not in scheme)
    compute = getattr(torch, dtype)
    weight = materialize(
        heavy(rows, columns, seed=columns, rows=False) * 0.05,
        get_scheme(scheme),
        compute,
    )
    product = VllmFactory(compute).linear("layer", [weight], [None])
    x = cancelling_inputs(weight.dequantized(torch.float32)[:16], compute, rows=400)
    together = on_threads(2, lambda: product(x))
    assert torch.equal(on_threads(1, lambda: product(x)), together)
    for count in (1, 2, 4):
        for few in (1, 2, 3, 7, 64):
            part = x[5 * few : 6 * few].contiguous()
            assert torch.equal(
                on_threads(count, lambda part=part: product(part)),
                together[5 * few : 6 * few],
            )


@pytest.mark.parametrize("words", WORDS)
def test_a_log_prob_is_computed_alike_beside_any_rows_and_on_any_threads(words: int):
    """Contract: this covers the output head, which no scheme quantizes, and the normalization over
    its vocabulary.
    """
    drawn = torch.randint(
        -99,
        100,
        (words, 1152),
        dtype=torch.int8,
        generator=seeded(0),
    )
    weight = materialize(drawn.bfloat16().mul_(1e-3), get_scheme("bf16"), torch.bfloat16)
    head = VllmFactory(torch.bfloat16).linear("lm_head", [weight], [None])
    x = normal(8, 1152, seed=1).bfloat16()

    def logprobs(rows: torch.Tensor) -> torch.Tensor:
        return head(rows).log_softmax(-1, dtype=torch.float32)

    together = on_threads(2, lambda: logprobs(x))
    for count in (1, 2):
        alone = on_threads(
            count, lambda: torch.cat([logprobs(x[row : row + 1]) for row in range(3)])
        )
        assert torch.equal(alone, together[:3])


@given(
    st.sampled_from(HEADS),
    st.sampled_from(DTYPES),
    st.sampled_from((33, 400, 700, 1500)),
    st.sampled_from((None, 7, 512)),
    st.booleans(),
)
@settings(max_examples=examples(80))
def test_a_token_attends_alike_prefilled_and_decoded_on_any_threads(
    heads: tuple[int, int, int], dtype: str, keys: int, window: int | None, fp8: bool
):
    """Contract: bits agree between whole sequences (as the learner has them), a chunk (as a resumed
    or cached prompt has them) and single queries, alone and beside others (as in decoding).
    Sequences are longer than the kernel's tiles for prompts.
    """
    H, G, D = heads
    assume(not fp8 or (AVX512 and D % 32 == 0))
    compute = getattr(torch, dtype)
    q = normal(keys, H, D, seed=0).to(compute)
    k = normal(keys, G, D, seed=1).to(compute)
    v = normal(keys, G, D, seed=2).to(compute)
    scoring = Scoring(scale=D**-0.5, window=window, fp8=fp8)

    def attend(start: int, stop: int) -> torch.Tensor:
        return attention.cpu_attention(
            q[start:stop], k[:stop], v[:stop], scoring, [stop - start], [stop]
        )

    whole = attend(0, keys)
    decoded = sorted({0, 15, keys // 2, keys - 2, keys - 1})
    seen_k = torch.cat([k[: at + 1] for at in decoded])
    seen_v = torch.cat([v[: at + 1] for at in decoded])
    ones = [1] * len(decoded)
    seen = [at + 1 for at in decoded]

    def beside() -> torch.Tensor:
        return attention.cpu_attention(q[decoded], seen_k, seen_v, scoring, ones, seen)

    for count in (1, 2, 4):
        assert torch.equal(on_threads(count, lambda: attend(0, keys)), whole)
        assert torch.equal(
            on_threads(count, lambda: attend(keys - 1, keys)),
            whole[keys - 1 :],
        )
        assert torch.equal(
            on_threads(count, lambda: attend(keys - 20, keys)),
            whole[keys - 20 :],
        )
        assert torch.equal(on_threads(count, beside), whole[decoded])


def test_attention_in_requests_of_any_length_depends_on_them():
    """Contract: without `short_requests` the fault that it removes is visible."""
    assert attention_depends_on_requests()


@pytest.mark.parametrize(
    ("isa", "shared", "window", "expected"),
    [
        ("vec", 1, None, 8),
        ("vec", 2, None, 4),
        ("vec", 3, None, 8),
        ("vec", 8, None, 1),
        ("vec", 16, None, 8),
        ("vec16", 16, None, 1),
        ("vec16", 1, None, 16),
        ("vec", 2, 2048, 4),
        ("vec", 2, 2049, 1),
        ("other", 1, None, 1),
    ],
)
def test_requests_fill_the_kernels_rows_once(
    isa: str, shared: int, window: int | None, expected: int
):
    """Contract: the expected numbers follow by hand from the kernel's sources.

    Heads that do not fill the rows evenly are computed one by one.
    """
    assert attention.queries_per_request(isa, shared, window) == expected


def test_short_requests_cover_every_query_once():
    """Contract: every query is covered once in three sequences of 5, 1 and 4 queries, of which the
    first and last see 2 and 6 earlier tokens.
    """
    requests = attention.short_requests(
        torch.tensor([0, 5, 6, 10]), torch.tensor([7, 1, 10]), queries=2
    )
    assert requests.start.tolist() == [0, 2, 4, 5, 6, 8, 10]
    assert requests.seen.tolist() == [4, 6, 7, 1, 8, 10]
    assert requests.sequence.tolist() == [0, 0, 0, 1, 2, 2]


def summed_in_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x · weightᵀ in bfloat16 with sums over halves of the columns."""
    half = x.shape[1] // 2
    products = x.float()[:, None] * weight.float()
    left = products[..., :half].sum(-1)
    right = products[..., half:].sum(-1)
    return (left + right).bfloat16()


def summed_row_by_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = [(row.float() * weight.float()).sum(-1) for row in x]
    return torch.stack(rows).bfloat16()


@pytest.mark.parametrize(
    ("otherwise", "when"), [(1, "1 row alone"), (3, "3 rows"), (33, "33 rows")]
)
def test_a_product_with_another_order_of_sums_for_few_rows_is_detected(otherwise: int, when: str):
    """Contract: another order of summation for one number of rows is detected, although random
    inputs would show little of it.
    """
    weight = normal(16, 1536, seed=0).bfloat16()

    def product(x: torch.Tensor) -> torch.Tensor:
        return summed_in_halves(x, weight) if len(x) == otherwise else summed_row_by_row(x, weight)

    difference = find_dependence(product, cancelling_inputs(weight.float(), torch.bfloat16))
    assert difference is not None
    assert difference.when == when
    assert difference.fraction > 0.003


def test_a_product_with_another_order_of_sums_on_one_thread_is_detected():
    weight = normal(16, 1536, seed=0).bfloat16()

    def product(x: torch.Tensor) -> torch.Tensor:
        return (
            summed_in_halves(x, weight)
            if torch.get_num_threads() == 1
            else summed_row_by_row(x, weight)
        )

    differences = []

    def ask() -> torch.Tensor:
        differences.append(
            find_dependence(product, cancelling_inputs(weight.float(), torch.bfloat16))
        )
        return torch.tensor(torch.get_num_threads())

    assert int(on_threads(2, ask)) == 2
    (difference,) = differences
    assert difference is not None
    assert difference.when == "on 1 thread"


def test_thread_counts_are_set_although_vllm_replaced_set_num_threads(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: this holds although vLLM's worker replaces `torch.set_num_threads` by a function
    that does nothing.
    """
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    before = torch.get_num_threads()
    assert int(on_threads(3, lambda: torch.tensor(torch.get_num_threads()))) == 3
    assert torch.get_num_threads() == before


def test_a_convolutions_weight_that_vllm_packs_has_no_product():
    """Contract: vLLM's packing leaves as it is. With AVX512-BF16 the packed weight is a matrix."""
    register()
    from vllm.model_executor.layers import utils

    layer: Any = nn.Module()
    layer.weight = nn.Parameter(normal(64, 1, 4, seed=1).bfloat16(), requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    assert not hasattr(layer, "cpu_linear")


def test_a_product_that_computes_rows_alike_passes():
    weight = normal(16, 1536, seed=0)
    x = cancelling_inputs(weight, torch.bfloat16)
    assert len(x) == ROWS_TESTED
    assert find_dependence(lambda rows: summed_row_by_row(rows, weight), x) is None


@pytest.mark.parametrize("experts", [False, True])
def test_a_models_kernels_are_checked_once_for_each_shape(experts: bool):
    """Contract: the expected list is by hand, for two decoder layers: stacked q, k and v; output
    projection; gate and up; down if its shape differs; head; attention; and experts with their
    router in one of the layers.
    """
    checked = random_policy(experts).check_rows()
    assert checked.dependent == ()
    assert checked.kernels == (7 if experts else 6)
    assert str(checked).endswith(f"{checked.kernels} kernels asked")
    require_equal_rows(checked)


def test_a_layer_that_multiplies_a_single_row_differently_is_named(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: if one layer of a model multiplies a single row differently, `bitwise` refuses the
    model and names the layer.
    """
    model = random_policy(experts=False)
    stack = next(iter(model._layers.stacks.values()))
    kernel = stack.kernel

    class RowAloneIsOther:
        name = kernel.name

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return kernel(x) + (len(x) == 1)

    monkeypatch.setattr(stack, "_kernel", RowAloneIsOther())
    checked = model.check_rows()
    assert [kernel.layer for kernel in checked.dependent] == [stack.parts[0].layer]
    with pytest.raises(
        AuditError,
        match=r"^bitwise, and 1 of \d+ kernels compute a row otherwise .*1 row alone",
    ):
        require_equal_rows(checked)


def random_policy(experts: bool) -> LowBitModel:
    model = random_moe(CONFIGS["qwen3_moe"]) if experts else qwen3(intermediate_size=384)
    return low_bit(model, "w8a8", kernel="vllm")
