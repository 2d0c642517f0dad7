"""Tests of attention by the engine's kernel: values, gradients, and independence of sequences.
tests/engine/test_publish.py checks that it gives the engine's bits.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, Gemma4TextConfig, LlamaConfig, MambaConfig

from qarl.configs.errors import ModelError
from qarl.quant.graph.attention import attention, torch_attention
from qarl.quant.graph.packing import Sequences, pack
from qarl.quant.kernels import cpu_attention as kernel
from qarl.quant.kernels.base import Scoring
from tests.support.kernels import AVX512, no_cuda
from tests.support.tensors import normal, pairwise_equal

pytestmark = no_cuda
LENGTHS = [1, 33, 7, 64, 7, 7]
APART = Sequences.apart(LENGTHS)
Rows = list[torch.Tensor]
SINKS = torch.tensor([-1.0, 0.5, 2.0, 5.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of 1": {"window": 1},
    "window of 7": {"window": 7},
    "window of 40": {"window": 40},
    "cap": {"cap": 2.0},
    "ALiBi": {"slopes": SLOPES},
    "sinks": {},
    "sinks and all else": {"cap": 2.0, "window": 7, "slopes": SLOPES},
    "FP8 cache": {"fp8": True},
    "FP8 queries": {"fp8": True, "fp8_queries": True},
}


def inputs(dtype: torch.dtype, head: int = 32) -> Rows:
    """Return q of four heads and k and v of two heads, of all sequences in one row."""
    return [
        normal(sum(LENGTHS), h, head, seed=n).to(dtype).requires_grad_()
        for n, h in enumerate((4, 2, 2))
    ]


def attend(
    rows: Rows, scoring: Scoring, row: Sequences, sinks: Any = None, by: Any = attention
) -> torch.Tensor:
    q, k, v = rows
    return by(q, k, v, sinks, scoring, row)


def test_layers_without_a_window_read_pictures_from_left_to_right_where_others_are_marked():
    """Contract: Gemma 4's layers with a window are marked by vLLM; Gemma 3's have no mark."""
    mark = "mm_prefix_clamp_sliding_window"
    marked, other, unmarked = (SimpleNamespace(**{mark: value}) for value in (True, False, False))
    assert kernel.sees_pictures_whole(marked, [marked, other])
    assert not kernel.sees_pictures_whole(other, [marked, other])
    assert kernel.sees_pictures_whole(unmarked, [other, unmarked])


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pictures_tokens_see_all_of_it(dtype: torch.dtype, window: int | None):
    """Contract: values and gradients of a mask in fp32, and for a picture's token the bits of the
    same query decoded after the whole picture. Other tokens have the bits of causal attention over
    the same keys. Pictures end within the window.
    """
    rows = inputs(dtype)
    start = torch.tensor([0, *LENGTHS]).cumsum(0)
    sees = torch.cat([torch.arange(1, length + 1) for length in LENGTHS])
    pictures = [(1, 3, 20), (1, 22, 30), (3, 0, 33), (5, 2, 7)]  # sequence, first token, end
    for sequence, first, end in pictures:
        sees[start[sequence] + first : start[sequence] + end] = end
    row = Sequences(tuple(LENGTHS), tuple(LENGTHS), sees=sees)
    scoring = Scoring(scale=32**-0.5, window=window)
    y = attend(rows, scoring, row)
    q, k, v = (t.detach().float().requires_grad_() for t in rows)
    mask = torch.zeros(len(sees), len(sees), dtype=torch.bool)
    for begin, end in pairwise(start.tolist()):
        keys = torch.arange(end - begin)
        own = keys[None] < sees[begin:end, None]
        if window is not None:
            own &= keys[None] > keys[:, None] - window
        mask[begin:end, begin:end] = own
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)),
        attn_mask=mask,
        scale=scoring.scale,
        enable_gqa=True,
    )[0].transpose(0, 1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=tolerance)
    out = normal(*y.shape, seed=9)
    actual = torch.autograd.grad(y, rows, out.to(dtype))
    reference = torch.autograd.grad(expected, (q, k, v), out.to(dtype).float())
    for gradient, wanted in zip(actual, reference, strict=True):
        torch.testing.assert_close(gradient.float(), wanted, rtol=0, atol=5 * tolerance)
    with torch.no_grad():
        causal = attend(rows, scoring, APART)
        text = sees == torch.cat([torch.arange(1, length + 1) for length in LENGTHS])
        assert torch.equal(y[text], causal[text])
        begin = int(start[1])
        after = Sequences((1,), (20,), torch.arange(begin, begin + 20))
        one = attend([rows[0][begin + 5][None], *rows[1:]], scoring, after)
        assert torch.equal(y[begin + 5], one[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [32, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_gradients_are_those_of_torchs_attention(
    dtype: torch.dtype, head: int, kind: str
):
    """Contract: values equal torch's up to one rounding; both compute in fp32, vLLM's kernel with
    an exponential that is good to 1e-5. Gradients are torch's for the same inputs, with an FP8
    cache for the cache's values. Blind spot: sinks in float16, which vLLM's kernel does not take.
    """
    if "FP8" in kind and (head % 32 or not AVX512):
        pytest.skip("vLLM has no FP8 cache of such heads, or on such CPUs")
    scoring = Scoring(scale=0.3, **KINDS[kind])
    of_sinks = torch.float32 if dtype == torch.float16 else dtype
    results = []
    for function in (attention, torch_attention):
        leaves = inputs(dtype, head) + [SINKS.to(of_sinks).requires_grad_()] * ("sinks" in kind)
        if function is torch_attention:
            rounded = "q" * scoring.fp8_queries + "kv" * scoring.fp8
            leaves[:3] = [
                (
                    t.detach().to(torch.float8_e4m3fn).to(dtype).requires_grad_()
                    if name in rounded
                    else t
                )
                for name, t in zip("qkv", leaves, strict=False)
            ]
        y = attend(leaves[:3], scoring, APART, *leaves[3:], by=function)
        dy = normal(y.numel(), 1, seed=4).view(y.shape).to(dtype)
        results.append((y, torch.autograd.grad(y, leaves, dy)))
    (y, ours), (expected, theirs) = results
    bound = max(4 * torch.finfo(dtype).eps, 2e-5)
    torch.testing.assert_close(y, expected, rtol=bound, atol=bound)
    assert pairwise_equal(ours, theirs)


@pytest.mark.parametrize(
    ("window", "fp8"),
    [(None, False), (7, False), *[(None, True)] * AVX512],
)
def test_a_tokens_bits_depend_on_no_other_sequence_and_no_later_token(
    window: int | None, fp8: bool, monkeypatch
):
    """Contract: packed sequences equal each sequence by itself, and a sequence's first tokens equal
    those without the rest, so decoding equals scoring the whole sequence. Pages may be larger, as
    the engine's are.
    """
    rows = [t.detach() for t in inputs(torch.bfloat16)]
    scoring = Scoring(scale=0.3, window=window, fp8=fp8)

    def alone(start: int, count: int) -> torch.Tensor:
        return attend(
            [t[start : start + count] for t in rows],
            scoring,
            Sequences.apart([count]),
        )

    starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
    whole = torch.cat([alone(*part) for part in zip(starts, LENGTHS, strict=True)])
    assert torch.equal(attend(rows, scoring, APART), whole)
    for count in (1, 31, 32, 33, 63):
        assert torch.equal(alone(41, count), whole[41 : 41 + count])
    monkeypatch.setattr(kernel, "_BLOCK", 128)
    assert torch.equal(attend(rows, scoring, APART), whole)


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("function", [attention, torch_attention])
def test_a_shared_prompt_gives_the_bits_of_a_prompt_per_sequence(
    function: Callable[..., torch.Tensor], window: int | None
):
    """Contract: a response's attention over the first sequence's prompt has the bits of a whole
    sequence's. A prompt's gradient is the sum over all sequences that see it, up to fp32 rounding.
    """
    # the third is another group's, and shares nothing
    whole = torch.tensor([40, 9, 37, 38])
    shared = torch.tensor([0, 7, 0, 33])
    leader = torch.tensor([0, 0, 2, 2])
    packed = pack(whole, 40, shared, leader)
    row = packed.sequences
    scoring = Scoring(scale=0.3, window=window)
    assert row.lengths == (40, 2, 37, 5)
    assert row.seen == (40, 9, 37, 38)
    assert row.positions(torch.device("cpu"))[40:42].tolist() == [7, 8]
    tokens = sum(row.lengths)
    once = [t.detach()[:tokens].requires_grad_() for t in inputs(torch.float32)]
    real = torch.arange(40) < whole[:, None]
    own = packed.kept[real]
    places = packed.places[real]
    each = [t.detach()[places].requires_grad_() for t in once]
    y = attend(once, scoring, row, by=function)
    expected = attend(each, scoring, Sequences.apart(whole.tolist()), by=function)
    bound = 0 if function is attention else 1e-6
    torch.testing.assert_close(y, expected[own], rtol=bound, atol=bound)
    dy = normal(y.numel(), 1, seed=4).view(y.shape)
    y.backward(dy)
    expected.backward(
        torch.zeros_like(expected).index_copy_(
            0,
            own.nonzero().flatten(),
            dy,
        )
    )
    for a, b in zip(once, each, strict=True):
        summed = torch.zeros_like(a).index_add_(0, places, b.grad)  # type: ignore[arg-type]
        torch.testing.assert_close(a.grad, summed, rtol=1e-5, atol=1e-5)


def test_heads_that_no_engine_has_are_refused():
    """Contract: a head size that vLLM lacks on CPUs is refused.

    Models without attention and with latent attention pass.
    """
    for passing in (
        LlamaConfig(hidden_size=128, num_attention_heads=4),
        MambaConfig(),
        DeepseekV2Config(),
    ):
        kernel.require_head_size("m", passing)
    with pytest.raises(
        ModelError,
        match=r"'m' has attention heads of 16 values, which vLLM lacks on CPUs \(there are 32,",
    ):
        kernel.require_head_size("m", LlamaConfig(hidden_size=64, num_attention_heads=4))


@pytest.mark.parametrize(("size", "refused"), [(64, False), (48, True)])
def test_every_layers_head_size_is_looked_at(size: int, refused: bool):
    """Check Gemma 4, whose layers of full attention have heads of another size than the rest."""
    kind: Any = Gemma4TextConfig  # it also takes what is no field of its own
    config = kind(num_hidden_layers=6, head_dim=32, global_head_dim=size)
    words = rf"heads of {size} values" if refused else ""
    with pytest.raises(ModelError, match=words) if refused else nullcontext():
        kernel.require_head_size("m", config)
