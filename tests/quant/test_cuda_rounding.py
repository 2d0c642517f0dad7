"""What the learner's operators do on CUDA, on CPU tensors: rounding by torch's transcription of vLLM's kernels, and
calls of vLLM's operators where its CPU build has them too. Blind spot: the CUDA kernels themselves (tests/gpu)."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from qarl.quant.kernels import vllm_operators
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.gradients import Gradients
from qarl.quant.operators import rounding
from qarl.quant.operators.autograd import RMSNorm
from qarl.quant.operators.decoder import EngineDecoderLayer
from qarl.quant.operators.moe import route
from tests.support.tensors import normal

BF16 = torch.bfloat16


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are rounded as CUDA's are; vLLM's operators stay with tensors that are on a GPU."""
    monkeypatch.setattr(rounding, "rounds_as_cuda", lambda x: True)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 → the nearest bfloat16, halves to even, as fp32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def disassembled_norm(branch: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The sm_90 code's steps: HADD2.BF16; squares of the rounded sum; two FMUL; one F2FP.BF16. Inputs whose squares add
    up exactly have one mean, in whatever order."""
    total = to_bf16(branch + residual)
    mean = (total.astype(np.float64) ** 2).mean(-1, keepdims=True).astype(np.float32)
    inverse = torch.from_numpy(mean + np.float32(1e-6)).rsqrt().numpy()
    return to_bf16((total * inverse) * weight)


def exact_rows(seed: int) -> torch.Tensor:
    """Multiples of 1/8 up to 8: bfloat16 values whose sums need rounding, and whose squares add up exactly."""
    return torch.randint(-64, 65, (33, 64), generator=torch.Generator().manual_seed(seed)).to(torch.float32) / 8


def test_a_norm_rounds_once_and_after_the_sum(as_cuda: None):
    """To the bit. That of CPUs, of the unrounded sum and rounded twice, gives others for these inputs."""
    branch, residual = (exact_rows(seed) * scale for seed, scale in ((0, 1.0), (1, 0.015625)))
    weight = normal(64, seed=2).to(BF16)
    total = branch.to(BF16) + residual.to(BF16)
    expected = torch.from_numpy(disassembled_norm(*(t.to(BF16).float().numpy() for t in (branch, residual, weight))))
    y = RMSNorm.apply(total, weight, 1e-6, Gradients(), True)
    assert y.dtype == BF16 and torch.equal(y.float(), expected)
    wide = branch.to(BF16).float() + residual.to(BF16).float()
    on_cpus = (wide * rounding.inverse_rms(wide, 1e-6)).to(BF16) * weight
    assert not torch.equal(on_cpus.float(), expected)


def test_gradients_of_a_norm_are_those_of_cpus(monkeypatch: pytest.MonkeyPatch):
    """The same formula, of 1 / rms computed again."""
    x, weight, dy = normal(20, 64, seed=1).to(BF16), normal(64, seed=2).to(BF16), normal(20, 64, seed=3).to(BF16)
    found = []
    for cuda in (False, True):
        monkeypatch.setattr(rounding, "rounds_as_cuda", lambda x, cuda=cuda: cuda)
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        RMSNorm.apply(*leaves, 1e-6, Gradients()).backward(dy)
        found.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Scaled(nn.Module):
    """Stands for attention or MLP."""

    def forward(self, x: torch.Tensor, *rest: object) -> torch.Tensor:
        return x * 0.37


@pytest.mark.parametrize("cuda", [False, True])
def test_the_residual_stream_is_rounded_on_cuda_alone(cuda: bool, monkeypatch: pytest.MonkeyPatch):
    """Contract: on CUDA a layer takes and returns the compute dtype, each sum rounded before its norm; on CPUs fp32
    sums, of which the residual alone is rounded."""
    monkeypatch.setattr(rounding, "rounds_as_cuda", lambda x: cuda)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32
    )
    plain = Qwen3DecoderLayer(config, 0).to(BF16)
    layer = EngineDecoderLayer(plain, LayerContext(BF16, "reference"))
    layer.self_attn, layer.mlp = Scaled(), Scaled()  # type: ignore[assignment]
    hidden = normal(1, 5, 64, seed=4)
    hidden = hidden.to(BF16) if cuda else hidden
    cos = torch.zeros(1, 5, 32, dtype=BF16)
    y = layer(hidden, position_embeddings=(cos, cos))
    branch = layer.input_layernorm(hidden) * 0.37
    first = branch + hidden if cuda else branch.float() + hidden.to(BF16).float()
    branch = layer.post_attention_layernorm(first) * 0.37
    second = branch + first if cuda else branch.float() + first.to(BF16).float()
    assert y.dtype == (BF16 if cuda else torch.float32) and torch.equal(y, second)


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's operators here are those of GPUs")
def test_vllms_operators_are_called_as_they_want():
    """By vLLM's kernels for CPUs, which take the same arguments: packed rows, angles of one row for all heads."""
    x = normal(1, 5, 3 * 32, seed=3).to(BF16).view(1, 5, 3, 32)
    angles = torch.linspace(0, 40, 5 * 16).view(1, 5, 16).repeat(1, 1, 2)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    before = x.clone()
    assert torch.equal(vllm_operators.rotary_embedding(x, cos, sin), rounding.rotated(x, cos, sin))
    assert torch.equal(x, before)
    gate, up = normal(7, 64, seed=4).to(BF16), normal(7, 64, seed=5).to(BF16)
    torch.testing.assert_close(vllm_operators.silu_and_mul(gate, up), rounding.gated(gate, up, nn.SiLU()))
    weight = normal(32, seed=6).to(BF16)
    for added in (False, True):
        y = vllm_operators.rms_norm(x, weight, 1e-6, added)
        expected = (x.float() * rounding.inverse_rms(x, 1e-6)).to(BF16) * weight
        assert y.shape == x.shape and torch.equal(y, expected) and torch.equal(x, before)


def test_experts_among_equals_are_the_first_on_cuda(as_cuda: None):
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]], dtype=BF16)
    weights, index = route(logits, 2, True)
    assert index.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5))


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_weights_are_the_operators_and_have_a_gradient(
    as_cuda: None, renormalize: bool, monkeypatch: pytest.MonkeyPatch
):
    """Whatever last bits the engine's operator gives are used; the gradient is that of the formula."""
    logits = normal(9, 16, seed=1).to(BF16)
    exact = logits.float().softmax(-1).topk(4)
    best = exact.values / exact.values.sum(-1, keepdim=True) if renormalize else exact.values
    others = best * (1 + 3e-7)
    monkeypatch.setattr("qarl.quant.operators.moe._best_on_cuda", lambda *_: (others, exact.indices))
    leaf = logits.clone().requires_grad_()
    weights, _ = route(leaf, 4, renormalize)
    assert torch.equal(weights, others) and not torch.equal(others, best)
    pull = normal(9, 4, seed=2)
    weights.backward(pull)
    plain = logits.float().requires_grad_()
    chosen = plain.softmax(-1).gather(-1, exact.indices)
    (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen).backward(pull)
    assert leaf.grad is not None and plain.grad is not None
    torch.testing.assert_close(leaf.grad.float(), plain.grad, rtol=0.01, atol=1e-4)
