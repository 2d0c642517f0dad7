"""Tests of the parity chain on a CUDA device: master → codes → product → layer → engine.

Run them there by `pytest -m gpu`.

Blind spot: nothing here has run on a GPU yet. On CPUs, test_materialize, test_linear, test_experts
and test_publish test the same chain.

Axes: N tokens, O output rows, I input columns, E experts.
"""

from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.kernels import make_factory
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import materialize
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import SCHEMES, get_scheme
from tests.support import Policies
from tests.support.gpu_schemes import RUNS_EXPERTS, bound, need
from tests.support.kernels import needs_cuda
from tests.support.tensors import relative_error, same_bits, seeded

pytestmark = [pytest.mark.gpu, needs_cuda("the products and codes of GPUs")]
DTYPE = torch.bfloat16
schemes = pytest.mark.parametrize("scheme", SCHEMES)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed)) * 0.1


@schemes
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_cpu(scheme: str, master: torch.dtype):
    weight = values(256, 512).to(master)
    on_cpu = materialize(weight, get_scheme(scheme), DTYPE)
    on_gpu = materialize(weight.cuda(), get_scheme(scheme), DTYPE)
    assert same_bits(
        on_cpu.tensors(),
        ((name, tensor.cpu()) for name, tensor in on_gpu.tensors()),
    )


_ROWS = (512, 1024, 4096, 6144, 12288)
PRODUCTS = [
    *((tokens, 256, 512) for tokens in (1, 17, 256)),
    *((1, rows, 2048) for rows in _ROWS),
    *((22528, rows, 2048) for rows in _ROWS),
]
"""Tokens, rows and columns: rows of the layers of Qwen3-0.6B to 8B over 2048 columns, for one
decoded token and for a micro-batch.
"""


@schemes
@pytest.mark.parametrize(("tokens", "rows", "columns"), PRODUCTS)
def test_products_agree_with_the_dequantized_one(scheme: str, tokens: int, rows: int, columns: int):
    """Contract: vLLM's and the reference product are within a relative error far below that of a
    wrong scale or code order and above rounding.
    """
    need(scheme)
    weight = materialize(values(rows, columns).cuda(), get_scheme(scheme), DTYPE)
    x = values(tokens, columns, seed=1).cuda().to(DTYPE)
    expected = make_factory("reference", DTYPE).linear("layer", [weight], [None])(x)
    assert relative_error(
        make_factory("vllm", DTYPE).linear("layer", [weight], [None])(x), expected
    ) < bound(scheme)


@schemes
@pytest.mark.parametrize("family", ["vllm", "reference"])
def test_outputs_and_straight_through_gradients_are_those_of_the_cpu(scheme: str, family: str):
    if family == "vllm":
        need(scheme)

    def run(device: str, kernel: str) -> tuple[torch.Tensor, ...]:
        master = nn.Parameter(values(256, 512).to(device))
        linear = LowBitLinear(
            "layer", master, None, get_scheme(scheme), LayerContext(DTYPE, kernel)
        )
        linear.refresh()
        x = values(40, 512, seed=1).to(device).to(DTYPE).requires_grad_()
        y = linear(x)
        y.backward(values(40, 256, seed=2).to(device).to(DTYPE))
        assert x.grad is not None
        assert master.grad is not None
        return y.detach().cpu(), x.grad.cpu(), master.grad.cpu()

    for ours, expected in zip(run("cuda", family), run("cpu", "reference"), strict=True):
        assert relative_error(ours, expected) < bound(scheme)


REAL = (128, 8, 2048, 768)
"""Experts of Qwen3-30B-A3B: 128 of 768 columns, 8 per token."""


@pytest.mark.parametrize(
    ("scheme", "sizes", "tokens"),
    [(name, (8, 2, 256, 256), 64) for name in SCHEMES]
    + [(name, REAL, n) for name in RUNS_EXPERTS for n in (1, 4096)],
)
def test_experts_agree_with_the_dequantized_ones(
    scheme: str, sizes: tuple[int, int, int, int], tokens: int
):
    """Contract: vLLM's output and gradients are within one and a half times a product's bound of
    the dequantized ones.
    """
    need(scheme, experts=True)
    experts, top_k, hidden, inner = sizes
    shape = ExpertsShape(experts, top_k, hidden, inner, "silu", ExpertLayout())
    gate_up = values(experts, 2 * inner, hidden).cuda()
    down = values(experts, hidden, inner, seed=3).cuda()
    x = values(tokens, hidden, seed=1).cuda().to(DTYPE)
    index = torch.rand(tokens, experts, generator=seeded(4)).topk(top_k).indices.cuda()
    weights = torch.full((tokens, top_k), 1 / top_k, device="cuda")

    def run(kernel: str) -> list[torch.Tensor]:
        masters = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())
        context = LayerContext(DTYPE, kernel)
        module = RoutedLowBitExperts(
            "model.layers.0.mlp.experts", *masters, shape, get_scheme(scheme), context
        )
        module.refresh()
        inputs = x.clone().requires_grad_()
        y = module(inputs, index, weights)
        y.float().square().sum().backward()
        grads = [t.grad for t in (inputs, *masters)]
        return [y, *(grad for grad in grads if grad is not None)]

    ours = run("vllm")
    expected = run("reference")
    assert len(ours) == len(expected) == 4
    assert all(
        relative_error(a, b) < 1.5 * bound(scheme) for a, b in zip(ours, expected, strict=True)
    )


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_an_engine_that_was_published_to_equals_a_fresh_one(
    random_policy: Policies,
    random_experts: Policies,
    tmp_path: Path,
    scheme: str,
    eager: bool,
    experts: bool,
):
    """Contract: after an audit and five publishes of changing weights, log-probs equal those of a
    freshly loaded engine: bit for bit, or, if sums change their order from call to call, within
    twice the difference between two calls of the fresh engine.
    """
    from qarl.configs.schema.rollout import RolloutConfig
    from qarl.quant.checkpoint.load import load_masters
    from qarl.rollout.vllm.engine import VllmEngine
    from qarl.rollout.vllm.options import VllmOptions
    from qarl.sync.audit import audit, require_agreement
    from qarl.sync.export import export_checkpoint
    from qarl.sync.publisher import Publisher

    need(scheme, experts)
    folder = (random_experts if experts else random_policy)(False)
    options = VllmOptions(
        RolloutConfig(max_prompt_tokens=64, max_new_tokens=64, enforce_eager=eager)
    )
    masters = load_masters(folder, torch.float32, torch.device("cuda"))
    model = LowBitModel(masters, get_scheme(scheme), LayerContext(DTYPE, "vllm"))
    sequences = [list(range(20, 60)), [5] * 20]
    export_checkpoint(model, folder, tmp_path / "start")
    engine = VllmEngine(tmp_path / "start", options)
    require_agreement(audit(model.layer_reports(), engine.layer_reports(), same_kernels=True))
    publisher = Publisher(model, engine, sequences, None, 1)
    for version in range(1, 6):
        with torch.no_grad():
            for master in model.masters.values():
                master.mul_(1.01)
        model.refresh()
        publisher.publish(version)
    published = engine.logprobs(sequences)
    engine.close()
    export_checkpoint(model, folder, tmp_path / "end")
    fresh = VllmEngine(tmp_path / "end", options)
    first = torch.tensor(list(chain(*fresh.logprobs(sequences))))
    second = torch.tensor(list(chain(*fresh.logprobs(sequences))))
    fresh.close()
    difference = (torch.tensor(list(chain(*published))) - first).abs().max()
    assert difference <= 2 * (second - first).abs().max(), f"{difference} nats"
