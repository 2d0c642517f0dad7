"""gpt-oss's experts: transposed, alternating, with biases and limited gates.

tests/engine/test_families.py compares with what an engine samples after a publish.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from qarl.configs.errors import ModelError
from qarl.configs.schema.run import LayerRule
from qarl.learner.optim.optimizer import matrices_of
from qarl.quant.checkpoint.check_folder import check_model
from qarl.quant.checkpoint.families import ExpertLayout, experts_shape
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.lora import Adapter
from qarl.quant.schemes import SchemeError, get_scheme
from tests.support.kernels import no_cuda
from tests.support.layers import EXPERTS, routed
from tests.support.models import low_bit, randomize
from tests.support.tensors import normal, relative_error, seeded

CONFIG = GptOssConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_local_experts=5,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    sliding_window=8,
)
NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


def theirs(seed: int = 0) -> Any:
    """Return transformers' experts, some of whose gates and rows of up are beyond the limit."""
    CONFIG._experts_implementation = "eager"
    experts: Any = GptOssExperts(CONFIG)
    with torch.no_grad():
        for number, parameter in enumerate(experts.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + number) * 0.4)
    return experts


def ours(
    experts: Any, kernel: str, dtype: torch.dtype, scheme: str = "bf16"
) -> RoutedLowBitExperts:
    """Return the learner's layer over the same parameters."""
    shape = experts_shape(experts, ExpertLayout(stacked=True), CONFIG)
    masters = [nn.Parameter(experts.get_parameter(name).detach().clone()) for name in NAMES]
    layer = RoutedLowBitExperts(
        EXPERTS,
        masters[0],
        masters[1],
        shape,
        get_scheme(scheme),
        LayerContext(dtype, kernel),
        tuple(masters[2:]),
    )
    layer.refresh()
    return layer


def test_values_and_gradients_are_transformers():
    """Contract: output and gradients of input, routing weights, matrices and biases, in float32."""
    reference = theirs()
    layer = ours(reference, "reference", torch.float32)
    weights, index = routed(29, layer.shape)
    dy = normal(29, 64, seed=4)
    inputs = normal(29, 64, seed=3) * 3
    results = []
    for module in (reference, layer):
        x = inputs.clone().requires_grad_()
        w = weights.clone().requires_grad_()
        y = module(x, index, w)
        y.backward(dy)
        parameters = [module.get_parameter(name) for name in NAMES]
        results.append([y.detach(), x.grad, w.grad, *(p.grad for p in parameters)])
    merged = inputs @ reference.gate_up_proj[0]
    assert (merged.abs() > 7).any(), "limits are reached"
    for expected, actual in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-5


@no_cuda
def test_vllms_experts_are_the_formula():
    """Check vLLM's kernel for CPUs, which has the biases and the gate, and its row independence."""
    reference = theirs()
    layer = ours(reference, "vllm", torch.bfloat16)
    weights, index = routed(23, layer.shape)
    x = normal(23, 64, seed=3).bfloat16()
    with torch.no_grad():
        y = layer(x, index, weights)
        expected = reference(x.float(), index, weights)
        alone = [layer(x[n : n + 1], index[n : n + 1], weights[n : n + 1]) for n in range(23)]
    assert relative_error(y.float(), expected) < 0.01
    assert torch.equal(y, torch.cat(alone))


def test_the_checkpoint_is_transformers():
    """Contract: names, shapes and values of the stream, with quantized attention, too."""
    model = randomize(GptOssForCausalLM(CONFIG))
    expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
    stream = {
        item.name: item.tensor.clone()
        for item in low_bit(model, "bf16", operators="transformers").low_bit_tensors()
    }
    assert stream.keys() == expected.keys()
    assert all(torch.equal(stream[name], expected[name]) for name in expected)


@no_cuda
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8", "fp8"])
def test_quantized_experts_multiply_their_codes(scheme: str):
    """Contract: vLLM's layers have the matrices' codes, both biases and the gate, and a token's
    output does not depend on those beside it. The bound is that of two roundings to bfloat16, which
    turn codes of activations.
    """
    reference = theirs()
    layer = ours(reference, "vllm", torch.bfloat16, scheme)
    formula = ours(reference, "reference", torch.bfloat16, scheme)
    weights, index = routed(23, layer.shape)
    x = normal(23, 64, seed=3).bfloat16()
    with torch.no_grad():
        y = layer(x, index, weights)
        expected = formula(x, index, weights).float()
        alone = [layer(x[n : n + 1], index[n : n + 1], weights[n : n + 1]) for n in range(23)]
    assert relative_error(y.float(), expected) < 0.02
    assert torch.equal(y, torch.cat(alone))


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("w4a16-g32", ["w13_weight_packed", "w13_weight_scale"]),
        ("w8a8", ["w13_weight", "w13_weight_scale"]),
    ],
)
def test_quantized_experts_have_the_names_of_vllms_loader(scheme: str, names: list[str]):
    """Contract: one tensor an expert, and both biases stacked as in an unquantized checkpoint."""
    model = randomize(GptOssForCausalLM(CONFIG))
    stream = {
        item.name: item.tensor
        for item in low_bit(model, scheme, operators="transformers").low_bit_tensors()
    }
    experts = "model.layers.1.mlp.experts"
    expected = [f"{experts}.{number}.{name}" for number in range(5) for name in names]
    assert [name for name in stream if "w13" in name and name.startswith(experts)] == expected
    assert stream[f"{experts}.gate_up_proj_bias"].shape == (5, 192)
    assert f"{experts}.gate_up_proj" not in stream


def test_quantized_experts_are_refused_on_gpus_and_attention_alone_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.device("meta"):
        model = GptOssForCausalLM(CONFIG)
    with pytest.raises(SchemeError, match=r"experts 'model\.layers\.0\.mlp\.experts', which have"):
        plan_layers(model, get_scheme("w8a8"))
    plan = plan_layers(model, get_scheme("w8a8"), [LayerRule.model_validate("*.experts.*=bf16")])
    assert plan.schemes["model.layers.1.self_attn.o_proj"].name == "w8a8"
    assert {plan.schemes[name].name for name in plan.schemes if ".mlp." in name} == {"bf16"}


def test_muon_takes_gate_and_up_as_two_matrices():
    """Contract: they alternate in the columns, and every element belongs to one of them."""
    stack = torch.zeros(3, 4, 6)
    for number, index in enumerate(matrices_of("experts.gate_up_proj", stack.shape, True)):
        stack[index] += number
    expected = torch.arange(6.0).view(3, 1, 2).repeat(1, 4, 3)
    assert torch.equal(stack, expected)


def test_another_gate_than_vllms_is_refused():
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**{**CONFIG.to_dict(), "swiglu_limit": 5.0}))
    with pytest.raises(SchemeError, match=r"slope 1\.702 and limit 5\.0 \(swiglu_alpha"):
        plan_layers(model, get_scheme("bf16"))


def test_mxfp4_is_refused_with_the_way_to_bfloat16(tmp_path: Path):
    settings = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"(?s)\(mxfp4\).*Mxfp4Config\(dequantize=True\)"):
        check_model(tmp_path)


def test_adapters_of_transposed_stacks_have_the_gradients_of_their_product():
    """Contract: dB = s · dW Aᵀ and dA = s · Bᵀ dW, in the layout of the masters."""
    layer = ours(theirs(), "reference", torch.float32)
    reference = theirs()
    generator = seeded(3)
    for index, name in enumerate(NAMES[:2]):
        adapter = Adapter(layer.masters[index], 4, 8.0, generator)
        adapter.lora_B.data = normal(*adapter.lora_B.shape, seed=index) * 0.1
        layer.adapt(index, adapter)
        product = adapter.scale * (adapter.lora_B @ adapter.lora_A).detach()
        reference.get_parameter(name).data += product
    layer.refresh()
    weights, index = routed(29, layer.shape)
    x = normal(29, 64, seed=3)
    dy = normal(29, 64, seed=4)
    for module in (layer, reference):
        module(x, index, weights).backward(dy)
    for number, adapter in enumerate(layer.adapters):
        assert adapter is not None
        dw = reference.get_parameter(NAMES[number]).grad
        a, b = adapter.lora_A.detach(), adapter.lora_B.detach()
        expected = [adapter.scale * b.transpose(1, 2) @ dw, adapter.scale * dw @ a.transpose(1, 2)]
        for factor, gradient in zip((adapter.lora_A, adapter.lora_B), expected, strict=True):
            assert factor.grad is not None
            assert relative_error(factor.grad, gradient) < 1e-5


def test_experts_whose_activation_nobody_names_are_refused():
    """Contract: the configuration's name comes first, then that of the module's function."""
    config: Any = PreTrainedConfig()
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
    experts.down_proj = nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(SchemeError, match=r"as hidden_act in config\.json"):
        experts_shape(experts, ExpertLayout(), config)
    config.num_experts_per_tok = 1
    config.hidden_act = "silu"
    assert experts_shape(experts, ExpertLayout(), config).activation == "silu"
