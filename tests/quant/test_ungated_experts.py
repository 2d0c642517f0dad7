"""Nemotron-H's experts, which have no gate, in vLLM's layers on CPUs.

tests/engine/test_families.py compares with what an engine samples after a publish.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from qarl.configs.errors import NoEngineModelError
from qarl.preflight.support import require_engine_model
from qarl.quant.checkpoint.families import experts_shape, family_of
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.lora import Adapter
from qarl.quant.schemes import get_scheme
from tests.support.kernels import no_cuda
from tests.support.layers import EXPERTS, routed
from tests.support.models import low_bit, randomize
from tests.support.tensors import normal, relative_error, seeded

CONFIG = NemotronHConfig(
    vocab_size=96,
    hidden_size=64,
    layers_block_type=["linear_attention", "moe"],
    num_attention_heads=2,
    n_routed_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    moe_shared_expert_intermediate_size=64,
    routed_scaling_factor=2.5,
    mamba_num_heads=8,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
    time_step_min=1e-30,
)
NAMES = ("up_proj", "down_proj")
HEADS: dict[str, Any] = {"head_dim": 32}
"""Field that vLLM reads and transformers' class of GLM-4-MoE does not declare."""


def theirs(seed: int = 0) -> Any:
    """Return transformers' experts."""
    experts: Any = NemotronHExperts(CONFIG)
    with torch.no_grad():
        for number, parameter in enumerate(experts.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + number) * 0.4)
    return experts


def ours(
    experts: Any, kernel: str, dtype: torch.dtype, scheme: str = "bf16"
) -> RoutedLowBitExperts:
    """Return the learner's layer over the same parameters."""
    shape = experts_shape(experts, family_of("nemotron_h").experts, CONFIG)
    up, down = (nn.Parameter(experts.get_parameter(name).detach().clone()) for name in NAMES)
    layer = RoutedLowBitExperts(
        EXPERTS, up, down, shape, get_scheme(scheme), LayerContext(dtype, kernel)
    )
    layer.refresh()
    return layer


def test_values_and_gradients_are_transformers():
    """Contract: output and gradients of input, routing weights and matrices, in float32."""
    reference = theirs()
    layer = ours(reference, "reference", torch.float32)
    assert layer.shape.activation == "relu2"
    weights, index = routed(29, layer.shape)
    dy = normal(29, 64, seed=4)
    results = []
    for module in (reference, layer):
        x = (normal(29, 64, seed=3) * 3).requires_grad_()
        w = weights.clone().requires_grad_()
        y = module(x, index, w)
        y.backward(dy)
        parameters = [module.get_parameter(name) for name in NAMES]
        results.append([y.detach(), x.grad, w.grad, *(p.grad for p in parameters)])
    for expected, actual in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-5


@no_cuda
@pytest.mark.parametrize("scheme", ["bf16", "w4a16-g32", "w8a8", "fp8"])
def test_vllms_layers_multiply_the_codes(scheme: str):
    """Contract: vLLM's module of experts has the matrices and the activation, and a token's output
    does not depend on those beside it. The bound is that of two roundings to bfloat16, which turn
    codes of activations.
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
    assert layer.kernel.name.endswith(", per expert")
    assert relative_error(y.float(), expected) < 0.02
    assert torch.equal(y, torch.cat(alone))


def test_adapters_of_the_first_matrix_are_named_as_its_stack():
    """Contract: dB = s · dW Aᵀ and dA = s · Bᵀ dW for both stacks, as for gated experts."""
    layer = ours(theirs(), "reference", torch.float32)
    reference = theirs()
    for index, name in enumerate(NAMES):
        adapter = Adapter(layer.masters[index], 4, 8.0, seeded(3))
        adapter.lora_B.data = normal(*adapter.lora_B.shape, seed=index) * 0.1
        layer.adapt(index, adapter)
        product = adapter.scale * (adapter.lora_B @ adapter.lora_A).detach()
        reference.get_parameter(name).data += product
    layer.refresh()
    weights, index = routed(29, layer.shape)
    for module in (layer, reference):
        module(normal(29, 64, seed=3), index, weights).backward(normal(29, 64, seed=4))
    for name, adapter in zip(NAMES, layer.adapters, strict=True):
        assert adapter is not None
        dw = reference.get_parameter(name).grad
        a, b = adapter.lora_A.detach(), adapter.lora_B.detach()
        expected = [adapter.scale * b.transpose(1, 2) @ dw, adapter.scale * dw @ a.transpose(1, 2)]
        for factor, gradient in zip((adapter.lora_A, adapter.lora_B), expected, strict=True):
            assert factor.grad is not None
            assert relative_error(factor.grad, gradient) < 1e-5


def test_the_checkpoint_is_transformers(tmp_path: Path):
    """Contract: names and values of the stream, each expert's two matrices by name. transformers
    writes `backbone` where vLLM and transformers also read `model`.
    """
    model = randomize(NemotronHForCausalLM(CONFIG))
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    expected = {
        name.replace("backbone.", "model."): value.bfloat16() for name, value in written.items()
    }
    low_bit_model = low_bit(model, "bf16", operators="transformers")
    stream = {item.name: item.tensor.clone() for item in low_bit_model.low_bit_tensors()}
    assert stream.keys() == expected.keys()
    assert "model.layers.1.mixer.experts.4.up_proj.weight" in stream
    assert all(torch.equal(tensor.bfloat16(), expected[name]) for name, tensor in stream.items())


def test_each_quantized_expert_has_two_matrices():
    model = low_bit(randomize(NemotronHForCausalLM(CONFIG)), "w8a8", operators="transformers")
    names = {item.name for item in model.low_bit_tensors() if ".experts.3." in item.name}
    parts = [f"{name}.{suffix}" for name in NAMES for suffix in ("weight", "weight_scale")]
    assert names == {f"model.layers.1.mixer.experts.3.{part}" for part in parts}


@no_cuda
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        Glm4MoeConfig(
            **HEADS,
            vocab_size=96,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            routed_scaling_factor=2.5,
        ),
    ],
    ids=["nemotron_h", "glm4_moe"],
)
def test_scaled_sums_beside_shared_experts_are_refused_in_float16(config: Any):
    """Contract: vLLM's class computes another model in float16, which a comparison in float32 does
    not show; in bfloat16 it does not.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    plan = plan_layers(empty, get_scheme("bf16"))
    with pytest.raises(NoEngineModelError, match=r"up by routed_scaling_factor \(2\.5\).*bfloat16"):
        require_engine_model(empty, plan, torch.float16)
    require_engine_model(empty, plan, torch.bfloat16)
