"""Publishes into the layers of a GPU engine, on CPU tensors.

The reload is vLLM's own, and a stand-in for the platform makes vLLM choose its layers for GPUs.
Blind spot: what kernels make of the weights (tests/gpu); here processing only records what is
loaded.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticTensorSym,
)
from vllm.model_executor.model_loader import reload as reloading

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.vllm import VllmFactory, alone
from qarl.quant.materialize import materialize
from qarl.quant.materialize.experts import materialize_experts
from qarl.quant.schemes import SCHEMES, Scheme, get_scheme
from qarl.rollout.engine import EngineError
from qarl.rollout.vllm import worker
from qarl.rollout.vllm.in_place import unregistered_tensors
from tests.support.cuda_platform import (
    LAYOUT,
    config_of,
    engines_experts,
    fits,
    stub_cuda,
)
from tests.support.kernels import no_cuda
from tests.support.tensors import normal

HIDDEN = 256
HEAD = 64
EXPERTS = 4
ROWS = {"q": 2 * HEAD, "k": HEAD, "v": HEAD}
Stream = Iterator[tuple[str, Any]]


def stacked(
    scheme: Scheme, quantized: CompressedTensorsConfig | None, name: str
) -> tuple[nn.Module, Stream]:
    """Return a stack of q, k and v, and a loader of each tensor of a version.

    The stack has as few rows as possible, because an error in counting them weighs most then.
    """
    layer = QKVParallelLinear(
        HIDDEN,
        HEAD,
        2,
        1,
        bias=True,
        params_dtype=torch.bfloat16,
        quant_config=quantized,
        prefix=name,
        disable_tp=True,
    )

    def stream() -> Stream:
        for part, rows in ROWS.items():
            weight = materialize(normal(rows, HIDDEN, seed=rows), scheme, torch.bfloat16)
            for key, tensor in (*weight.tensors(), ("bias", torch.arange(rows) / 8)):
                parameter = getattr(layer, key)
                yield (
                    key,
                    lambda p=parameter, t=tensor, part=part: p.weight_loader(p, t, part),
                )

    return layer, stream()


def routed(
    scheme: Scheme, quantized: CompressedTensorsConfig | None, name: str
) -> tuple[nn.Module, Stream]:
    """Return a layer of routed experts, and a loader of each tensor of a version."""
    experts = ExpertsShape(EXPERTS, 2, HIDDEN, HIDDEN, "silu", LAYOUT)
    layer = engines_experts(experts, quantized, name)

    def stream() -> Stream:
        shapes = (EXPERTS, 2 * HIDDEN, HIDDEN), (EXPERTS, HIDDEN, HIDDEN)
        masters = [normal(shape[0] * shape[1], shape[2], seed=1).view(shape) for shape in shapes]
        weights = materialize_experts(masters[0], masters[1], scheme, torch.bfloat16, name)
        for key, tensor in weights.tensors(LAYOUT):
            yield (
                key.rpartition(".")[2],
                lambda pair=(key, tensor): list(layer.load_weights([pair])),
            )

    return layer, stream()


@no_cuda
@pytest.mark.parametrize("kind", [stacked, routed])
def test_a_publish_refills_one_layer_object(kind: Any):
    """Check every scheme that compute capability 9.0 has a kernel for.

    A publish writes the layer's own tensors and no others, in place, once, and only when all have
    arrived. `weight_shape` is not counted: a stack loads it more often than it has it, and it may
    arrive after the others.
    """
    factory = VllmFactory(torch.bfloat16)
    refilled = []
    with stub_cuda((9, 0)):
        for number, name in enumerate(
            name for name in SCHEMES if fits(get_scheme(name), (HEAD, HIDDEN))
        ):
            scheme = get_scheme(name)
            quantized = config_of(scheme)
            with factory._loading(torch.device("cpu")):
                try:
                    layer, stream = kind(scheme, quantized, f"model.layers.{number}.mlp.experts")
                except (NotImplementedError, ValueError, AssertionError):
                    continue  # no kernel: `support` refuses the scheme
                refill(layer, stream, name)
                refilled.append(name)
    assert len(refilled) > 8


def refill(layer: nn.Module, stream: Any, name: str) -> None:
    """Publish two versions into a layer, and check its tensors after each.

    At the first, processing permutes the bias into another storage, as Marlin does; at the second
    it registers another parameter too, as Humming does.
    """
    before = {
        key: (p, p.data_ptr(), p.shape, p.dtype) for key, p in layer.named_parameters(recurse=False)
    }
    version = list(stream)
    bias = getattr(layer, "bias", None)
    loaded = list[str]()
    seen = list[list[str]]()

    def prepare(module: Any) -> None:
        seen.append(list(loaded))
        if bias is not None:
            module.bias.data = module.bias.flip(0)
            if len(seen) > 1:
                module.bias = nn.Parameter(module.bias, requires_grad=False)

    layer.quant_method.process_weights_after_loading = prepare  # type: ignore
    reloading.record_metadata_for_reloading(layer)
    for number in (1, 2):
        loaded.clear()
        worker._begin_reload(layer)
        for key, load in version:
            loaded.append(key)
            load()
        reloading.finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))
        count = [len([key for key in keys if key != "weight_shape"]) for keys in (*seen, loaded)]
        assert len(count) == number + 1, name
        assert count[number - 1] == count[-1], name
        after = {
            key: (p, p.data_ptr(), p.shape, p.dtype)
            for key, p in layer.named_parameters(recurse=False)
        }
        assert before.keys() == after.keys(), name
        for key, (parameter, *place) in before.items():
            assert after[key][0] is parameter, (name, key)
            assert list(after[key][1:]) == place, (name, key)
        if bias is not None:
            assert torch.equal(
                bias.flip(0).float(),
                torch.cat([torch.arange(n) / 8 for n in ROWS.values()]),
            ), name
            bias.fill_(0)
            vars(bias).clear()
    check_that_a_lost_tensor_is_noticed(layer, version, name)


def check_that_a_lost_tensor_is_noticed(layer: nn.Module, version: Any, name: str) -> None:
    """Publish without each tensor in turn. Routed experts are passed over, as the worker says."""
    if not isinstance(layer, LinearBase):
        return
    for number, (lost, _) in enumerate(version):
        if lost == "weight_shape":
            continue
        worker._begin_reload(layer)
        for other, (_, load) in enumerate(version):
            if other != number:
                load()
        assert worker._waiting_layers(worker._processed_layers(layer)) == [""], (name, lost)
        worker._abandon_reload(layer)


@no_cuda
def test_graphs_read_each_version_where_the_first_was(monkeypatch: pytest.MonkeyPatch):
    """Check tensors that a kernel has beside the layer's, such as CUTLASS's strides for FP8.

    A publish refills them in place, and the kernel takes its scales from the layer. If they cannot
    be refilled, a publish to an engine with graphs is an error, and eager steps go on.
    """
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False, dtype=torch.bfloat16)
    )
    monkeypatch.setattr(worker, "set_current_vllm_config", lambda _: nullcontext())
    for name in ("trace_names", "checkpoint_names", "copied_modules"):
        monkeypatch.setattr(worker, name, lambda *_: {})
    factory = VllmFactory(torch.bfloat16)
    scheme = get_scheme("fp8")
    model = nn.Module()
    others = [torch.full((2,), 1)]

    def prepare(layer: Any) -> None:
        method = layer.quant_method
        experts = method.experts_cls(layer.moe_config, method.get_fused_moe_quant_config(layer))
        method.moe_kernel = SimpleNamespace(fused_experts=experts, others=[others[-1].clone()])

    with stub_cuda((9, 0)), factory._loading(torch.device("cpu")):
        layer, stream = routed(scheme, config_of(scheme), "model.layers.90.mlp.experts")
        version: Any = list(stream)
        model.layer, layer.quant_method.process_weights_after_loading = layer, prepare  # type: ignore
        model.load_weights = lambda _: [load() for _, load in version]  # type: ignore[assignment]
        reloading.record_metadata_for_reloading(model)
        prepare(layer)
        first = unregistered_tensors(model)
        assert len(first) >= 4
        others.append(torch.full((2,), 2))
        worker.load_stream(model, config, iter(()))
        for path, (_, _, tensor) in unregistered_tensors(model).items():
            assert tensor is first[path][2]
            assert "others" not in path or tensor.tolist() == [2, 2]
        others.append(torch.zeros(3))
        with pytest.raises(
            EngineError,
            match=r"others\.0.*cannot refill; set rollout\.enforce_eager true",
        ):
            worker.load_stream(model, config, iter(()))
        config.model_config.enforce_eager = True
        worker.load_stream(model, config, iter(()))


def test_an_engine_quantizes_inputs_in_its_layers():
    """Check that gate and quantization of inputs are not fused, from the start, before graphs.

    A fused kernel rounds differently from the learner, which quantizes the inputs of its layers.
    """
    with alone(), set_current_vllm_config(VllmConfig()):
        gate = SiluAndMul()
        linear = ReplicatedLinear(32, 32, disable_tp=True)
    linear._input_quant_key = kFp8StaticTensorSym  # type: ignore[assignment]
    x = normal(3, 64, seed=0)
    with pytest.raises((AttributeError, TypeError)):  # no such kernel for CPUs
        maybe_fused_act_quant(gate, x, linear)
    with stub_cuda((9, 0)):
        unfused = maybe_fused_act_quant(gate, x, linear)
    assert isinstance(unfused, torch.Tensor)
    assert torch.equal(unfused, gate(x))
