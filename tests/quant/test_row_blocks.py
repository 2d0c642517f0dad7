"""Rows worked on a block at a time: every row once, and the same bits as all rows at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qarl.learner.logprobs import _Normalized
from qarl.quant.layers import straight_through as backward
from qarl.quant.layers.gradients import Gradients
from qarl.quant.layers.straight_through import add_weight_gradient
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.runtime import cpu_blocks as blocks
from qarl.quant.runtime.cpu_blocks import row_blocks
from qarl.quant.schemes import get_scheme
from tests.support.tensors import as_bytes, heavy, normal


@given(st.integers(0, 40), st.integers(0, 9), st.integers(1, 50))
def test_blocks_are_all_rows_once(rows: int, columns: int, elements: int):
    """Contract: the blocks of every tensor are that tensor's rows in order, each block within the bound or one row."""
    wide, narrow = torch.arange(rows * columns).view(rows, columns), torch.arange(rows)
    before, blocks._ELEMENTS = blocks._ELEMENTS, elements
    try:
        parts = list(row_blocks(wide, narrow))
    finally:
        blocks._ELEMENTS = before
    assert torch.equal(torch.cat([p for p, _ in parts]), wide)
    assert torch.equal(torch.cat([p for _, p in parts]), narrow)
    assert all(len(p) <= 1 or p.numel() <= elements for p, _ in parts)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a8", "fp8-block", "nvfp4"])
def test_activations_by_blocks_are_those_of_all_rows(scheme: str, monkeypatch: pytest.MonkeyPatch):
    """Contract: codes, scales and zero points of every token, and a weight gradient out of them, are bit for bit those
    of all tokens at once; the gradient's own blocks are of 16 tokens."""
    monkeypatch.setattr(backward, "_TOKENS", 16)
    x, dy = heavy(41, 256, seed=3).bfloat16(), normal(41, 24, seed=4).bfloat16()
    whole = quantize_activation(x, get_scheme(scheme))
    expected = torch.zeros(24, 256)
    add_weight_gradient(expected, dy, whole.dequantized(torch.float32), Gradients())
    for elements in (1, 3 * 256, 1 << 20):
        monkeypatch.setattr(blocks, "_ELEMENTS", elements)
        found = quantize_activation(x, get_scheme(scheme))
        for ours, theirs in zip(vars(found).values(), vars(whole).values(), strict=True):
            assert torch.equal(as_bytes(ours), as_bytes(theirs)) if torch.is_tensor(theirs) else ours == theirs
        total = torch.zeros(24, 256)
        add_weight_gradient(total, dy, found, Gradients())
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probs_by_blocks_are_those_of_all_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Contract: log-probs, entropies and their gradient are bit for bit those of plain operators on the whole."""
    logits, targets, dy = normal(37, 211, seed=1).to(dtype), torch.arange(37) * 5, normal(37, 1, seed=2)[:, 0]
    logp = logits.log_softmax(-1, dtype=torch.float32)
    picked, entropies = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    gradient = logits.softmax(-1, dtype=torch.float32) * -dy[:, None]
    gradient = gradient.scatter_add(-1, targets[:, None], dy[:, None]).to(dtype)
    for elements in (1, 3 * 211, 1 << 20):
        monkeypatch.setattr(blocks, "_ELEMENTS", elements)
        leaf = logits.clone().requires_grad_()
        found = _Normalized.apply(leaf, targets, True, 1.0)
        assert torch.equal(found[0], picked) and torch.equal(found[1], entropies)
        assert torch.equal(torch.autograd.grad(found[0], leaf, dy)[0], gradient)
