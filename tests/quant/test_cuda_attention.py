"""Attention as CUDA has it, on CPU tensors and on tensors without values. Blind spot: FlashAttention (tests/gpu)."""

import ast
from pathlib import Path

import pytest
import torch

from qarl.quant.kernels import flash_attention as flash
from qarl.quant.operators.attention import attention, torch_attention
from qarl.quant.operators.packing import Sequences
from tests.support.fake_cuda import Calls
from tests.support.tensors import normal

BF16 = torch.bfloat16
LENGTHS = [5, 1, 7, 3]
APART = Sequences.apart(LENGTHS)


def test_attention_of_many_sequences_is_one_call(monkeypatch: pytest.MonkeyPatch):
    """Contract: one product forward and one backward, whatever the number of sequences, without asking for a value."""
    monkeypatch.setattr(flash, "takes", lambda q: True)
    q, k, v = (torch.empty(1, sum(LENGTHS), heads, 64, dtype=BF16, device="meta") for heads in (4, 2, 2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with Calls() as calls:
        y = attention(q, k, v, 0.125, APART, "reference")
        y.sum().backward()
    assert y.shape == q.shape and [t.grad.shape for t in leaves] == [t.shape for t in leaves]  # type: ignore[union-attr]
    assert [name for name in calls.names if "attn" in name] == ["_varlen_attn", "_varlen_attn_backward"]


def test_attention_asks_the_engines_kernel(monkeypatch: pytest.MonkeyPatch):
    """Contract: its arguments are those vLLM's function has, and what it returns is used. The function here is torch's
    attention; its backward is that of the values kept."""
    from vllm.v1.attention.backends import fa_utils

    # Its module does not import without the CUDA extensions; its text tells as much.
    file = Path(fa_utils.__file__).parents[3] / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    known = {argument.arg for argument in functions["flash_attn_varlen_func"].args.args}
    asked = {}

    def by_torch(**kwargs):
        assert kwargs.keys() <= known
        asked.update(kwargs)
        q, k, v = (kwargs[name] for name in "qkv")
        return torch_attention(q, k, v, kwargs["softmax_scale"], APART), torch.zeros(q.shape[1::-1])

    monkeypatch.setattr(flash, "takes", lambda q: True)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", by_torch, raising=False)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: 3)
    q, k, v = (normal(sum(LENGTHS), heads * 32, seed=heads).to(BF16).view(1, -1, heads, 32) for heads in (4, 2, 2))
    attention(q, k, v, 0.3, APART, "vllm", window=4)
    assert asked["window_size"] == [3, 0]
    y = attention(q, k, v, 0.3, APART, "vllm")
    assert asked["window_size"] == [-1, 0]
    assert torch.equal(y[0], torch_attention(q[0], k[0], v[0], 0.3, APART))
    assert asked["cu_seqlens_q"].tolist() == [0, 5, 6, 13, 16] and asked["max_seqlen_k"] == 7
    assert (asked["causal"], asked["fa_version"], asked["cu_seqlens_q"].dtype) == (True, 3, torch.int32)
