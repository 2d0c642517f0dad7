"""Mixtures of experts in the real engine: its tensors, its products, and repeated publishes."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.configs.errors import GraphError
from qarl.quant.kernels import make_factory
from qarl.quant.kernels.vllm_cpu import register
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.types import LowBitTensor
from qarl.rollout.engine import EngineError
from qarl.rollout.vllm.engine import VllmEngine
from qarl.sync.audit import audit, require_agreement
from qarl.sync.publisher import Publisher, PublishError
from tests.support import Policies
from tests.support.cases import cases
from tests.support.engines import (
    SEQUENCES,
    answers_when_fresh,
    disturb,
    make_model,
    start_engine,
)
from tests.support.layers import routed
from tests.support.moe_models import CONFIGS, random_moe, with_tokenizer
from tests.support.profiles import examples, thorough
from tests.support.tensors import as_bytes, heavy

Running = tuple[LowBitModel, VllmEngine]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="holds vLLM's experts on CPUs to the learner's"
)


def call(engine: VllmEngine, function: Callable[..., Any], *args: object) -> Any:
    """Run function(model, *args) inside the engine's worker, on the model it holds."""
    return engine._llm.collective_rpc(
        lambda worker: function(worker.model_runner.get_model(), *args)
    )[0]


def routed_experts(model: torch.nn.Module, layer: str) -> Any:
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return next(
        m for m in model.modules() if isinstance(m, RoutedExperts) and m.layer_name == layer
    )


def held(experts: Any) -> dict[str, torch.Tensor]:
    """Return every tensor that a `RoutedExperts` module multiplies with.

    They are its own, or those of its experts' dense layers.
    """
    found = dict(experts.named_parameters())
    for prefix, linears in getattr(experts.quant_method, "dense", {}).items():
        for number, linear in enumerate(linears):
            tensors = [*linear.named_parameters(), *linear.named_buffers()]
            found |= {
                f"{prefix}.{number}.{name}": tensor for name, tensor in tensors if tensor.numel()
            }
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def check_every_layer_is_the_engines(model: LowBitModel, engine: VllmEngine) -> None:
    """Check that the engine has the bytes of the learner's kernel, and multiplies alike.

    The kernel is built again from the published tensors. The results of several batches are equal
    to the bit.
    """
    for name, layer in model.experts.items():
        kernel: Any = make_factory("vllm", layer.context.dtype).experts(
            layer.layer, layer.shape, layer.codes()
        )
        ours = held(kernel._experts)
        theirs = call(engine, lambda m, n: held(routed_experts(m, n)), name)
        assert ours.keys() == theirs.keys()
        assert ours
        for key, tensor in ours.items():
            assert torch.equal(as_bytes(tensor), as_bytes(theirs[key])), f"{name}: {key}"
        for tokens in (1, 5, 40):
            weights, index = routed(tokens, layer.shape)
            x = heavy(tokens, layer.shape.hidden, seed=tokens, rows=False).to(model.dtype)
            with torch.no_grad(), model.context.own_kernels():
                y = call(engine, forward, name, x, weights, index)
                assert torch.equal(layer(x, index, weights), y), f"{name}, {tokens} tokens"


def forward(
    model: torch.nn.Module,
    name: str,
    *given: torch.Tensor,
) -> torch.Tensor:
    experts = routed_experts(model, name)
    (x, weights, index) = given
    return experts.forward_modular(
        x, weights, index.to(experts.quant_method.topk_indices_dtype or torch.int32)
    ).clone()


def publish_and_compare(
    running: Running,
    folder: Path,
    tmp_path: Path,
    dtype: str,
    publishes: int,
    bound: float | None = None,
) -> None:
    """Audit and compare layers, publish changing weights, and compare layers and answers again.

    The answers are compared with a fresh engine's.
    """
    model, engine = running
    try:
        require_agreement(audit(model.layer_reports(), engine.layer_reports(), same_kernels=True))
        reported = {row.name: row.scheme for row in engine.layer_reports()}
        assert reported.keys() >= model.experts.keys()
        for name, found in model.plan.schemes.items():
            if name != "lm_head" or name in reported:
                assert (
                    reported[name if name in reported else name.rsplit(".", 2)[0]] == found.name
                ), name
        check_every_layer_is_the_engines(model, engine)
        publisher = Publisher(model, engine, SEQUENCES, bound, canary_every=publishes)
        if model.operators == "engine":
            publisher.share_layers()
        before = engine.logprobs(SEQUENCES)
        for version in range(1, publishes + 1):
            disturb(model, version)
            publisher.publish(version)
        publisher.canary(publishes)
        check_every_layer_is_the_engines(model, engine)
        publisher.unshare_layers()
        disturb(model, publishes + 1)
        engine.load(model.low_bit_tensors(), publishes + 1)
        after = engine.logprobs(SEQUENCES)
    finally:
        engine.close()
    assert after != before
    assert after == answers_when_fresh(model, folder, tmp_path / "fresh", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scheme", "dtype", "tied", "layers", "count"),
    cases(__file__, "publishes") + thorough() * cases(__file__, "more publishes"),
)
def test_publishes_equal_a_fresh_engine_bit_for_bit(
    random_experts: Policies,
    tmp_path: Path,
    kind: str,
    scheme: str,
    dtype: str,
    tied: bool,
    layers: str,
    count: int,
):
    """Check tensors, products and answers before and after publishes of changing weights.

    Expert by expert the engine has the tensors of the learner's own kernel. It multiplies to the
    same bits, and answers as an engine that loaded the last weights from disk. This includes layers
    of experts in different schemes, and a router that is quantized by its exact name. oneDNN's
    packed int8 weights are not parameters; for them equal products are the proof. DeepSeek has a
    test of its own below.
    """
    folder = random_experts(tied)
    if kind == "mixtral":
        folder = with_tokenizer(kind, folder, tmp_path / "model")
    model = make_model(folder, scheme, dtype, layers=layers)
    assert len({layer.scheme.name for layer in model.experts.values()}) == (
        1 if layers == "[]" else 2
    )
    engine = start_engine(model, folder, tmp_path / "start", dtype)
    publish_and_compare((model, engine), folder, tmp_path, dtype, examples(count))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scheme", "layers"),
    [
        ("deepseek_v2", "bf16", "[]"),
        ("deepseek_v3", "w8a8", "[]"),
        ("deepseek_v3", "w4a16", "*.kv_b_proj=bf16"),
    ],
)
def test_deepseek_is_published_right(
    random_experts, tmp_path: Path, kind: str, scheme: str, layers: str
):
    """Check grouped routing with a correction bias, shared experts and latent attention.

    The engine takes every publish as a fresh one takes the export, also the halves of `kv_b_proj`,
    which are made from its codes. Its log-probs of prompts are the learner's, bit for bit.
    """
    folder = with_tokenizer(kind, random_experts(True), tmp_path / "model")
    model = make_model(folder, scheme, layers=layers)
    assert model.operators == "engine"
    engine = start_engine(model, folder, tmp_path / "start", "bfloat16")
    publish_and_compare((model, engine), folder, tmp_path, "bfloat16", 3, bound=0.0)


def test_vllm_rotates_queries_of_several_heads_wrongly():
    """Check the fault that `quant.kernels.vllm_cpu.rotary` works around.

    `rotary_embedding` is right for queries [N, heads·D], and wrong for [N, heads, D]. When this
    test fails, see whether that file can go, and the row in docs/lab/workarounds.md.
    """
    rope = rotary_embedding()
    positions, q, k = heads_to_rotate()
    right, _ = rope.forward_native(positions, q.clone(), k.clone())
    vllms_own = inspect.unwrap(type(rope).forward_cpu)
    flat, _ = vllms_own(
        rope,
        positions,
        q.flatten(1).clone(),
        k.flatten(1).clone(),
    )
    stacked, _ = vllms_own(rope, positions, q.clone(), k.clone())
    torch.testing.assert_close(flat.view_as(right), right)
    assert not torch.allclose(stacked, right, atol=0.1)


def test_heads_in_three_dimensions_are_rotated_as_those_in_two():
    """Check queries and keys as latent attention gives them: parts of wider tensors, rotated in
    place. The rest of those tensors keeps its values.
    """
    register()
    rope = rotary_embedding()
    positions, q, k = heads_to_rotate()
    flat_q, flat_k = rope.forward_cpu(
        positions,
        q.flatten(1).clone(),
        k.flatten(1).clone(),
    )
    wide_q = torch.cat(
        (torch.ones(9, 4, 128), q),
        dim=-1,
    )
    wide_k = torch.cat(
        (torch.ones(9, 512), k[:, 0]),
        dim=-1,
    )
    rotated = rope.forward_cpu(
        positions,
        wide_q[..., 128:],
        wide_k[:, 512:].unsqueeze(1),
    )
    assert torch.equal(rotated[0], flat_q.view_as(q))
    assert torch.equal(rotated[1], flat_k.view_as(k))
    assert torch.equal(wide_q, torch.cat((torch.ones(9, 4, 128), flat_q.view_as(q)), dim=-1))
    assert torch.equal(wide_k, torch.cat((torch.ones(9, 512), flat_k), dim=-1))
    alone, none = rope.forward_cpu(positions, q.clone())
    assert torch.equal(alone, flat_q.view_as(q))
    assert none is None


def rotary_embedding() -> Any:
    """Return vLLM's default rotary embedding of 64 columns a head, fp32."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return get_rope(64, 64, False, rope, torch.float32)


def heads_to_rotate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions [9], queries [9, 4, 64] and keys [9, 1, 64]."""
    q = heavy(9, 4, 64, seed=0, rows=False)
    return torch.arange(9), q, heavy(9, 1, 64, seed=1, rows=False)


@pytest.fixture(scope="module")
def running(
    random_experts: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = random_experts(True)
    model = make_model(folder, "w4a16")
    engine = start_engine(model, folder, tmp_path_factory.mktemp("run") / "start", "bfloat16")
    yield model, engine
    engine.close()


EXPERTS = "model.layers.1.mlp.experts"
LACKING = cases(__file__, "lacking")
"""Part of an expert → its tensors."""


@pytest.mark.slow
@pytest.mark.parametrize("drop", LACKING.values(), ids=LACKING)
def test_a_publish_that_lacks_an_experts_tensor_is_refused(running: Running, drop: Sequence[str]):
    model, engine = running
    report = engine.load(
        [item for item in model.low_bit_tensors() if item.name not in drop],
        1,
    )
    assert any(name.startswith(EXPERTS) for name in report.missing), report
    assert len(drop) < 3 or f"{EXPERTS}.5.up_proj" in report.missing, (
        "a matrix that is lost is named"
    )
    assert not [name for name in report.missing if not name.startswith(EXPERTS)]
    again = engine.load(model.low_bit_tensors(), 2)
    assert (again.missing, again.unconsumed) == ((), ())


@pytest.mark.slow
@pytest.mark.parametrize("expert", [f"{EXPERTS}.8", "model.layers.7.mlp.experts.0"])
def test_an_experts_tensor_too_many_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch, expert: str
):
    """Check a surplus tensor, which vLLM may notice in mid-stream.

    It is the last test with this file's engine, which refuses to answer afterwards.
    """
    model, engine = running
    extra = LowBitTensor(f"{expert}.up_proj.weight_scale", torch.ones(128, 1, dtype=torch.bfloat16))
    items = [*model.low_bit_tensors(), extra]
    monkeypatch.setattr(model, "low_bit_tensors", lambda: items)
    with pytest.raises((EngineError, PublishError), match=r"experts\.8|layers\.7"):
        Publisher(model, engine, SEQUENCES, 0.05, 50).publish(1)


def test_mixtrals_router_cannot_be_quantized(tmp_path: Path):
    """Check that the router is refused, because vLLM builds it without a scheme.

    vLLM would not start ("no module or parameter named …gate.weight_scale").
    """
    random_moe(CONFIGS["mixtral"]).save_pretrained(tmp_path)
    with pytest.raises(
        GraphError,
        match=r"block_sparse_moe\.gate' would be in 'w8a8', and vLLM multiplies it unquant",
    ):
        make_model(tmp_path, "w4a16", layers="model.layers.0.block_sparse_moe.gate=w8a8")
