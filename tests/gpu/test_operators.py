"""The learner's operators on a GPU against the engine's, and its backwards against CPUs'. Nothing here has run yet.

Axes: N tokens, C columns, H heads, D head size, E experts.
"""

import dataclasses
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.kernels.activations import multiplied_activation
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.gradients import Gradients
from qarl.quant.layers.straight_through import add_weight_gradient
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.operators import rounding
from qarl.quant.operators.attention import attention, torch_attention
from qarl.quant.operators.moe import route
from qarl.quant.operators.packing import Sequences, pack
from qarl.quant.schemes import get_scheme
from tests.support.kernels import needs_cuda
from tests.support.tensors import relative_error

pytestmark = [pytest.mark.gpu, needs_cuda("the operators of GPUs")]
needs_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
BF16 = torch.bfloat16
LENGTHS = [300, 1, 77, 1024, 2]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda().to(BF16)


def share_equal(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).double().mean())


@needs_vllm
@pytest.mark.parametrize("tokens", [1, 4096])
@pytest.mark.parametrize("columns", [1024, 2048, 4096])
def test_norms_round_as_the_transcription_says(tokens: int, columns: int):
    """What was read from the wheel's sm_90 code. Sums of squares have an order of their own, which moves few results
    across a rounding boundary; a second rounding would move a third of them. Blind spot: that order."""
    x, weight = values(tokens, columns), values(columns, seed=1)
    once = (x.float() * rounding.inverse_rms(x, 1e-6) * weight.float()).to(BF16)
    twice = (x.float() * rounding.inverse_rms(x, 1e-6)).to(BF16) * weight
    for added in (False, True):
        y = rounding.cuda_norm(x, weight, 1e-6, added)
        assert share_equal(y, once) > 0.99 > share_equal(y, twice)


@needs_vllm
@pytest.mark.parametrize("tokens", [1, 4096])
def test_norms_and_rotation_are_the_engines_bits(tokens: int):
    """By the modules vLLM's decoders are made of, alone and with a residual; angles out of its table."""
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from qarl.quant.kernels.vllm_operators import rotary_table

    branch, residual, weight = values(tokens, 2048), values(tokens, 2048, seed=1), values(2048, seed=2)
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    parameters = {"rope_theta": 1e6, "rope_type": "default"}
    with set_current_vllm_config(config), torch.device("cuda"):
        norm = RMSNorm(2048, 1e-6, dtype=BF16)
        rope = get_rope(128, max_position=8192, rope_parameters=parameters, dtype=BF16)
    norm.weight.data.copy_(weight)
    assert torch.equal(rounding.cuda_norm(branch, weight, 1e-6, False), norm(branch.clone()))
    expected, total = norm(branch.clone(), residual.clone())
    assert torch.equal(rounding.cuda_norm(total, weight, 1e-6, True), expected)
    q, positions = values(tokens, 16, 128, seed=3), torch.arange(tokens, device="cuda")
    table = rotary_table(128, 8192, parameters, BF16, torch.device("cuda"))
    cos, sin = (angle.repeat(1, 2) for angle in table[positions].chunk(2, dim=-1))
    turned, _ = rope(positions, q.clone().view(tokens, -1), None)
    assert torch.equal(rounding.rotated(q, cos, sin).view(tokens, -1), turned)


@needs_vllm
def test_rotation_and_gate_are_the_formulas(monkeypatch: pytest.MonkeyPatch):
    """Equal but where a fused multiply-add rounds once less."""
    x, gate, up = values(4096, 16, 128), values(4096, 3072, seed=2), values(4096, 3072, seed=3)
    turns = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(64) / 64)
    cos, sin = (angle.repeat(1, 2).cuda().to(BF16) for angle in (turns.cos(), turns.sin()))
    rotated, gated = rounding.rotated(x, cos, sin), rounding.gated(gate, up, nn.SiLU())
    monkeypatch.setattr(rounding, "has_vllm", lambda: False)
    assert share_equal(rotated, rounding.rotated(x, cos, sin)) > 0.99
    assert share_equal(gated, rounding.gated(gate, up, nn.SiLU())) > 0.99


@needs_vllm
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_is_a_softmax_in_fp32_with_the_first_among_equals(renormalize: bool):
    logits = values(4096, 128)
    weights, index = route(logits, 8, renormalize)
    best = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(index.sort(dim=-1).values, best.indices[:, :8].sort(dim=-1).values)
    expected = best.values[:, :8].sum(-1)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(expected) if renormalize else expected)


@needs_vllm
@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_activation_codes_are_near_those_of_cpus(scheme: str):
    """They divide where CPUs multiply with a reciprocal: another code now and then, never another scale."""
    x = values(512, 2048)
    ours, cpus = multiplied_activation(x, get_scheme(scheme)), quantize_activation(x, get_scheme(scheme))
    torch.testing.assert_close(ours.scale.float(), cpus.scale.float(), rtol=1e-6, atol=0.0)
    assert share_equal(ours.codes.float(), cpus.codes.float()) > 0.99


_SEEN, _SHARED = torch.tensor([[300, 201, 77, 1024, 30], [0, 200, 0, 170, 29]])
SEQUENCES = {
    "apart": Sequences.apart(LENGTHS),
    "shared prompts": pack(_SEEN, 1024, _SHARED, leader=torch.tensor([0, 0, 2, 0, 2])).sequences,
}


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("heads", [(16, 8), (32, 4)])
def test_attention_and_its_gradients(kernel: str, heads: tuple[int, int], sequences: str):
    """Against torch's of each sequence alone, in fp32."""
    row = SEQUENCES[sequences]
    tokens = sum(row.lengths)
    row = dataclasses.replace(row, places=None if row.places is None else row.places.cuda())
    shapes = [(heads[0], 1), (heads[1], 2), (heads[1], 3)]
    q, k, v = ours = [values(1, tokens, count, 128, seed=seed).requires_grad_() for count, seed in shapes]
    theirs = [t.detach().float().requires_grad_() for t in ours]
    y = attention(q, k, v, 128**-0.5, row, kernel)
    q_, k_, v_ = (t[0] for t in theirs)
    expected = torch_attention(q_, k_, v_, 128**-0.5, row)[None]
    dy = values(1, tokens, heads[0], 128, seed=4)
    y.backward(dy)
    expected.backward(dy.float())
    assert relative_error(y.float(), expected) < 0.01
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        assert relative_error(a.grad.float(), b.grad) < 0.02


def seconds(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 10


def test_weight_gradients_of_quantized_activations_are_as_fast():
    """At most twice the time of unquantized ones: no product in fp32 without tensor cores."""
    total, dy, x = torch.zeros(2048, 2048, device="cuda"), values(8192, 2048), values(8192, 2048, seed=1)
    low_bit = quantize_activation(x, get_scheme("w8a8"))
    plain = seconds(lambda: add_weight_gradient(total, dy, x, Gradients()))
    assert seconds(lambda: add_weight_gradient(total, dy, low_bit, Gradients())) < 2 * plain


def test_gradients_of_128_experts_and_their_time():
    """A real layer's shape (Qwen3-30B-A3B): 16,384 tokens of 8 experts, one expert without any, within a second; values
    are those of the loop over experts."""
    shape = ExpertsShape(128, 8, 2048, 768, "silu", ExpertLayout())
    gate_up, down = (nn.Parameter(values(*s).float() * 0.03) for s in ((128, 1536, 2048), (128, 2048, 768)))
    context = LayerContext(BF16, "reference")
    experts = RoutedLowBitExperts("model.layers.0.mlp.experts", gate_up, down, shape, get_scheme("w4a16"), context)
    experts.refresh()
    x = values(16384, 2048, seed=3).requires_grad_()
    logits = values(16384, 128, seed=4)
    logits[:, 5] = -100.0
    weights, index = route(logits, 8, True)
    dy = values(16384, 2048, seed=5)

    def backward() -> list[torch.Tensor]:
        y = experts(x, index, weights.detach())
        torch.cuda.synchronize()
        started = time.perf_counter()
        found = list(torch.autograd.grad(y, [x, gate_up, down], dy))
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
        return found

    taken: list[float] = []
    found = [backward() for _ in range(2)][-1]
    assert taken[-1] < 1.0, f"{taken} s"
    experts.multiplies_grouped = lambda dy: False  # type: ignore[method-assign]
    for a, b in zip(found, backward(), strict=True):
        assert relative_error(a.float(), b.float()) < 0.02
