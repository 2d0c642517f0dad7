"""Tests of attention by CUDA's code path, on CPU tensors and on tensors without values.

Blind spot: FlashAttention (tests/gpu).
"""

import ast
from pathlib import Path

import pytest
import torch
from vllm.v1.attention.backends import fa_utils

from qarl.quant.graph.attention import attention, torch_attention
from qarl.quant.graph.packing import Sequences
from qarl.quant.kernels import flash_attention as flash
from qarl.quant.kernels.base import Scoring
from tests.support.fake_cuda import Calls
from tests.support.tensors import normal, pairwise_equal

BF16 = torch.bfloat16
LENGTHS = [5, 1, 7, 3]
APART = Sequences.apart(LENGTHS)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=BF16)
KINDS = {
    "plain": {},
    "window": {"window": 4},
    "cap and sinks": {"cap": 2.0},
    "ALiBi": {"slopes": torch.ones(4)},
}


def test_attention_of_many_sequences_is_one_call(monkeypatch: pytest.MonkeyPatch):
    """Contract: forward and backward are one product each for any number of sequences and read no
    value. Torch's operators, which round each result, compute scores in fp32 if a score is more
    than a product.
    """
    monkeypatch.setattr(flash, "takes", lambda *query: True)
    monkeypatch.setattr(flash, "_engine_version", lambda *query: None)
    q = torch.empty(sum(LENGTHS), 4, 64, dtype=BF16, device="meta")
    k = torch.empty(sum(LENGTHS), 2, 64, dtype=BF16, device="meta")
    v = torch.empty(sum(LENGTHS), 2, 64, dtype=BF16, device="meta")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with Calls() as calls:
        y = attention(q, k, v, None, Scoring(scale=0.125), APART)
        y.sum().backward()
    assert y.shape == q.shape
    assert [t.grad.shape for t in leaves] == [t.shape for t in leaves]  # type: ignore[union-attr]
    assert [name for name in calls.names if "attn" in name] == [
        "_varlen_attn",
        "_varlen_attn_backward",
    ]
    with Calls() as calls:
        torch_attention(q, k, v, None, Scoring(scale=0.125, cap=2.0), APART)
    assert calls.dtypes == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_calls_the_engines_kernel(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Contract: the arguments are those of vLLM's function, including the parameters of the scores,
    and its result is used. If scores are more than scaled products, gradients are those of torch's
    attention in fp32.
    """
    # Its module does not import without the CUDA extensions; its text tells as much.
    file = Path(fa_utils.__file__).parents[3] / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = {
        node.name: node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    known = {argument.arg for argument in functions["flash_attn_varlen_func"].args.args}
    scoring = Scoring(scale=0.3, **KINDS[kind])
    calls = []
    sinks = SINKS if "sinks" in kind else None

    def by_torch(q, k, v, **rest):
        assert {"q", "k", "v", *rest} <= known
        calls.append(rest)
        y = torch_attention(q, k, v, sinks, scoring, APART)
        return y + 1, torch.zeros(q.shape[1::-1])

    monkeypatch.setattr(flash, "takes", lambda *query: True)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", by_torch, raising=False)
    monkeypatch.setattr(
        fa_utils,
        "get_flash_attn_version",
        lambda **needed: 2 if needed["requires_alibi"] else 3,
    )
    q, k, v = rows = [
        normal(sum(LENGTHS), heads, 32, seed=heads).to(BF16).requires_grad_() for heads in (4, 2, 2)
    ]
    y = attention(q, k, v, sinks, scoring, APART)
    expected = torch_attention(q, k, v, sinks, scoring, APART)
    (asked,) = calls
    assert torch.equal(y, expected + 1)
    assert asked["cu_seqlens_q"].tolist() == [0, 5, 6, 13, 16]
    assert asked["cu_seqlens_q"].dtype == torch.int32
    how = {
        "causal": True,
        "max_seqlen_k": 7,
        "softmax_scale": 0.3,
        "softcap": scoring.cap,
        "s_aux": sinks,
    }
    how |= {
        "window_size": [(scoring.window or 0) - 1, 0],
        "fa_version": 3 - (kind == "ALiBi"),
    }
    assert {name: asked[name] for name in how} == how
    assert asked["alibi_slopes"] is scoring.slopes
    if kind in ("cap and sinks", "ALiBi"):
        ours = torch.autograd.grad(y, rows, y.detach())
        theirs = torch.autograd.grad(expected, rows, y.detach())
        assert pairwise_equal(ours, theirs)


def test_sinks_and_capped_scores_take_torchs_attention(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: torch's attention serves sinks under FlashAttention 2, which does not have them,
    and capped scores without vLLM's function.
    """
    q = torch.empty(16, 4, 64, dtype=BF16)
    plain = Scoring(scale=1.0)
    capped = Scoring(scale=1.0, cap=2.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    taken = [
        (2, plain, None),
        (None, plain, None),
        (2, capped, None),
        (3, plain, SINKS),
    ]
    for version, *how in [
        *taken,
        (2, plain, SINKS),
        (None, capped, None),
    ]:
        monkeypatch.setattr(
            fa_utils,
            "get_flash_attn_version",
            lambda version=version, **needed: version,
        )
        assert flash.takes(q, *how) is ((version, *how) in taken)
    assert not flash.takes(q.float(), plain, None)
