"""Tests of LoRA: merged weights, the factors' gradients, what is frozen, what a
checkpoint holds.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from qarl.configs.errors import ConfigError
from qarl.configs.schema.lora import LoraConfig
from qarl.learner.learner import Learner
from qarl.quant.checkpoint.families import fused_experts
from qarl.quant.checkpoint.load import matrices_on_host
from qarl.quant.checkpoint.shapes import weight_shapes
from qarl.quant.layers.lora import Adapter
from qarl.quant.layers.stack import fuse_scales
from qarl.quant.materialize import materialize
from qarl.quant.model.add_lora import (
    LoraError,
    adapted_weights,
    add_adapters,
    describe_adapters,
)
from qarl.quant.runtime.shards import Shard
from qarl.quant.schemes import SCHEMES
from tests.support.cases import pattern
from tests.support.layers import (
    dequantized_activation,
    make_experts,
    make_linear,
    routed,
    textbook_gradients,
    unpacked,
)
from tests.support.learners import (
    all_equal,
    batch_of,
    logprobs_of,
    make_learner,
    masters_of,
    random_model,
)
from tests.support.models import low_bit, same_stream, stream_bytes
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.tensors import heavy, normal, relative_error, same_bits, seeded

LORA = LoraConfig(rank=4, alpha=12.0)


def adapter_for(base: torch.Tensor, seed: int = 3, zero: bool = False) -> Adapter:
    """Return an adapter whose B is not zero, as after some training."""
    adapter = Adapter(base, 4, 12.0, seeded(seed))
    if not zero:
        with torch.no_grad():
            adapter.lora_B.copy_(normal(*adapter.lora_B.shape, seed=seed + 1) * 0.05)
    return adapter


def lora_learner(
    scheme: str = "w4a16", seed: int = 0, lora: LoraConfig = LORA, **config: Any
) -> Learner:
    """Return a learner whose model has adapters from the start, drawn from seed 7."""
    plain = make_learner(scheme, seed=seed, **config)
    add_adapters(plain.model, lora, seed=7)
    return Learner(plain.model, plain.config)


def test_matrices_on_the_host_move_to_the_device_when_codes_are_made(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: every tensor except matrices of linear layers and experts is moved to the device,
    including a tied embedding, and materialized tensors are on the context's device. Blind spot:
    pinned memory and overlapped copies, which GPUs have.
    """
    model = random_moe(CONFIGS["qwen3_moe"])
    moved = set()
    to = torch.Tensor.to

    def noted(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        moved.add(tensor.data_ptr())
        return to(tensor, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", noted)
        matrices_on_host(model, torch.device("cpu"))
    parameters = model.named_parameters()
    unmoved = [name for name, parameter in parameters if parameter.data_ptr() not in moved]
    stayed = {name.rpartition(".")[0] for name in unmoved}
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    layers = linears | {name for name, _ in fused_experts(model)}
    if model.config.tie_word_embeddings:
        layers -= {"lm_head"}
    assert stayed == layers
    linear = make_linear("w4a16")
    assert {tensor.device.type for tensor in linear.merged()} == {"cpu"}
    linear.context.device = torch.device("meta")
    assert {tensor.device.type for tensor in linear.merged()} == {"meta"}


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16, torch.float16])
def test_the_merged_weight_is_base_plus_scaled_product(master: torch.dtype):
    """Contract: W + (12/4) B A equals float64, rounded once to the base's dtype.

    A process that holds some of the experts gets the bits that they have in the whole stack. A zero
    B gives the base bit for bit, including signs of zeros.
    """
    stack = (
        (heavy(3 * 32, 64, seed=0) * 0.05)
        .to(master)
        .view(
            3,
            32,
            64,
        )
    )
    adapter = adapter_for(stack)
    merged = adapter.merge(stack)
    a = adapter.lora_A.detach().double()
    b = adapter.lora_B.detach().double()
    exact = stack.double() + 3.0 * b @ a
    assert merged.dtype == master
    assert not torch.equal(merged, stack)
    error = (merged.double() - exact).abs()
    assert (error <= torch.finfo(master).eps * exact.abs() + 1e-7).all()
    for rank in range(2):
        shard = Shard(stack.shape, rank, (0, 1, 3))
        assert torch.equal(
            adapter.merge(shard.rows(stack), shard),
            shard.rows(merged),
        )
    stack[0, 0, :4] = -0.0
    same = adapter_for(stack, zero=True).merge(stack)
    assert torch.equal(torch.signbit(same), torch.signbit(stack))
    assert torch.equal(same, stack)


def test_a_is_drawn_as_peft_draws_it():
    """Contract: A is uniform in ±1/√I, drawn independently for every expert and equal for the same
    seed. B is zero.
    """
    base = torch.zeros(5, 48, 400)
    one = Adapter(base, 16, 32.0, seeded(1))
    again = Adapter(base, 16, 32.0, seeded(1))
    other = Adapter(base, 16, 32.0, seeded(2))
    a = one.lora_A.detach()
    assert a.shape == (5, 16, 400)
    assert one.lora_B.shape == (5, 48, 16)
    assert not one.lora_B.any()
    assert torch.equal(a, again.lora_A)
    assert not torch.equal(a, other.lora_A)
    assert not torch.equal(a[0], a[1])
    assert 0.049 < a.abs().max() <= 0.05 + 1e-7
    assert a.std() == pytest.approx(0.05 / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "plain"])
def test_an_adapted_layer_equals_a_layer_with_the_merged_master(scheme: str, aligned: bool):
    """Contract: codes, scales and products of an adapted layer are, bit for bit, those of a layer
    whose master is the merged weight, and before training those of the base. Layers that share a
    tensor-wide scale take it over each other's merged weights.
    """
    linear = make_linear(scheme, aligned=aligned)
    partner = make_linear(scheme, aligned=aligned, seed=5)
    x = heavy(6, 256, seed=2).bfloat16()
    base = linear(x)
    adapter = adapter_for(partner.master)
    linear.adapt(0, adapter_for(linear.master, zero=True))
    partner.adapt(0, adapter)
    linear.refresh()
    assert torch.equal(linear(x), base)
    with torch.no_grad():
        adapter.lora_B.mul_(1e4)
    masters = (linear.master.detach(), partner.master.detach())
    largest = max(float(master.abs().max()) for master in masters)
    # so that a tensor-wide scale is that of its merged weight
    assert partner.merged()[0].abs().max() > 2 * largest
    fuse_scales([[partner, linear]])
    linear.adapt(0, adapter_for(linear.master))
    linear.refresh()
    full = make_linear(scheme, aligned=aligned)
    full_partner = make_linear(scheme, aligned=aligned)
    full.master.data = linear.merged()[0]
    full_partner.master.data = partner.merged()[0]
    fuse_scales([[full_partner, full]])
    full.refresh()
    assert same_bits(linear.codes().tensors(), full.codes().tensors())
    assert torch.equal(linear(x), full(x))
    assert not torch.equal(linear(x), base)
    assert torch.equal(linear.weight_used(), full.weight_used())


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8", "nvfp4"])
def test_factor_gradients_are_autograds_through_the_merged_weight(scheme: str):
    """Contract: dA, dB and dx equal autograd's in float64 of y = x̂ · (Ŵ + s·BA - sg(s·BA))ᵀ, which
    has the value of the codes and the gradient of the merged weight. Base and bias get no gradient.
    """
    linear = make_linear(scheme, dtype=torch.float32)
    adapter = adapter_for(linear.master)
    linear.adapt(0, adapter)
    linear.master.requires_grad_(False)
    assert linear.bias is not None
    linear.bias.requires_grad_(False)
    linear.refresh()
    linear.context.gradients.scale = 8.0
    x = heavy(9, 256, seed=4).requires_grad_()
    dy = normal(9, 128, seed=5)
    linear(x).backward(dy * 8.0)
    assert x.grad is not None
    x.grad /= 8.0  # only masters' gradients are unscaled
    a = adapter.lora_A.detach().double().requires_grad_()
    b = adapter.lora_B.detach().double().requires_grad_()
    wide = x.detach().double().requires_grad_()
    used = wide + (dequantized_activation(x.detach(), linear) - wide).detach()
    delta = 3.0 * b @ a
    weight = unpacked(linear.codes()) + delta - delta.detach()
    (used @ weight.t()).backward(dy.double())
    for ours, theirs in (
        (x, wide),
        (adapter.lora_A, a),
        (adapter.lora_B, b),
    ):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) < 1e-5
    assert linear.master.grad is None
    assert linear.bias.grad is None


@pytest.mark.parametrize(
    ("scheme", "aligned"),
    [
        ("w4a16", True),
        ("w8a8", True),
        ("nvfp4a16", True),
        ("w4a16", False),
    ],
)
def test_factor_gradients_of_experts(scheme: str, aligned: bool):
    """Contract: with dW the dense reference's gradient of each merged expert (autograd, float64),
    dA = s Bᵀ dW and dB = s dW Aᵀ. Experts without a token get zeros. Codes are those of masters
    with the merged weights.
    """
    experts = make_experts(scheme, "reference", torch.float32, aligned=aligned)
    for master in experts.masters:
        master.requires_grad_(False)
    for place, master in enumerate(experts.masters):
        experts.adapt(place, adapter_for(master, seed=place))
    experts.refresh()
    experts.context.gradients.scale = 8.0
    weights, index = routed(11)
    index[index == 0] = 1
    x = heavy(11, experts.shape.hidden, seed=9)
    dy = normal(11, experts.shape.hidden, seed=11)
    experts(x, index, weights).backward(dy * 8.0)
    full = make_experts(scheme, "reference", torch.float32, aligned=aligned)
    full.gate_up_proj.data, full.down_proj.data = (m.clone() for m in experts.merged())
    full.refresh()
    assert torch.equal(experts(x, index, weights), full(x, index, weights))
    _, _, *dense = textbook_gradients(full, x, weights, index, dy)
    for adapter, master, dw in zip(experts.adapters, experts.masters, dense, strict=True):
        assert adapter is not None
        assert master.grad is None
        a = adapter.lora_A.detach().double()
        b = adapter.lora_B.detach().double()
        bound = 2e-3 if experts.quantizes_activations else 1e-5
        for ours, theirs in (
            (adapter.lora_A, 3.0 * b.mT @ dw),
            (adapter.lora_B, 3.0 * dw @ a.mT),
        ):
            assert ours.grad is not None
            assert relative_error(ours.grad, theirs) <= bound
            assert not ours.grad[0].any()
            assert ours.grad[1].any()


def test_the_first_policy_is_the_base_and_only_adapters_are_masters():
    """Contract: before training the stream is the base's bit for bit.

    Linear layers have adapters, and everything else is frozen.
    """
    base = make_learner().model
    model = lora_learner().model
    model.refresh()
    assert same_stream(model, stream_bytes(base))
    layers = [name for name in base.linears if name != "lm_head"]
    assert list(model.masters) == [f"{layer}.lora_{f}" for layer in layers for f in "AB"]
    assert model.matrices() == set(model.masters)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in model.masters.values()}
    told = describe_adapters(model, LORA)
    assert "rank 4, alpha 12 on 14 of 15 weight matrices" in told
    assert told.endswith("norms, biases, lm_head")
    assert f"{sum(p.numel() for p in model.masters.values()):,} parameters are trained" in told


@pytest.mark.parametrize(
    ("scheme", "optimizer"),
    [("w4a16", "muon"), ("w8a8", "adamw")],
)
def test_training_moves_only_adapters(scheme: str, optimizer: str):
    """Contract: over some updates, rewarded completions become likelier, the base keeps every bit
    and gets no gradient, the optimizer's state is that of the adapters only, and the stream is the
    materialized merged weights bit for bit.
    """
    wide = {"epsilon_high": 10.0, "delta_high": 10.0, "delta_low": 0.99}
    learner = lora_learner(
        scheme,
        objective=wide,
        optimizer={"name": optimizer, "lr": 5e-3, "weight_decay": 0.0},
    )
    model = learner.model
    batch = batch_of()
    before = {name: p.detach().clone() for name, p in model.loaded.items()}
    old = logprobs_of(learner, batch).values
    for seed in range(3):
        assert learner.learn(batch, step=seed).updates == 2
    new = logprobs_of(learner, batch).values
    lengths = batch.response_mask.sum(-1)
    rise = (new - old).sum(-1) / lengths
    advantages = batch.advantages.sum(-1) / lengths
    assert (rise * advantages).mean() > 0.02
    for name, parameter in model.loaded.items():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None, name
    states = learner.state_dict()["moments"]
    assert states.keys() == model.masters.keys()
    tensors = [tensor for state in states.values() for tensor in state.values()]
    moments = sum(tensor.numel() for tensor in tensors if tensor.ndim > 1)
    adapters = sum(master.numel() for master in model.masters.values())
    assert moments == (1 if optimizer == "muon" else 2) * adapters
    for name, linear in model.linears.items():
        if name == "lm_head":
            continue
        (adapter,) = linear.adapters
        assert adapter is not None
        assert adapter.lora_B.any()
        assert linear.low_bit is not None
        fused = tuple(other.merged()[0] for other in linear.fused)
        expected = materialize(linear.merged()[0], linear.scheme, torch.bfloat16, name, fused)
        assert same_bits(linear.low_bit.tensors(), expected.tensors()), name


def test_checkpointed_layers_give_adapters_the_same_gradients():
    """Contract: the factors' gradients have the same bits.

    Nothing below the first adapter has a gradient, so a recomputed input needs none.
    """
    plain, again = (
        lora_learner(gradient_checkpointing=given, mini_batches=1) for given in (False, True)
    )
    for learner in (plain, again):
        learner.learn(batch_of(0), step=0)
        learner.learn(batch_of(1), step=1)
    assert any(m.any() for n, m in masters_of(plain).items() if n.endswith("lora_B"))
    assert all_equal(masters_of(plain), masters_of(again))


def test_adapters_of_another_base_are_refused():
    """Contract: if one weight of the base differs by its last bit, the checkpoint is refused,
    because the adapters were trained on another policy. So is a checkpoint of full masters. Nothing
    of either is loaded.
    """
    learner = lora_learner()
    other = lora_learner()
    state = learner.state_dict()
    other.load_state_dict(state)
    other = lora_learner()
    with torch.no_grad():
        weight = other.model.loaded["model.norm.weight"]
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
        other.model.masters["model.layers.0.mlp.up_proj.lora_B"].fill_(1.0)
    before = masters_of(other)
    for wrong in (state, make_learner().state_dict()):
        with pytest.raises(
            ConfigError,
            match=r"adapters are for a base with .*, this policy has digest [0-9a-f]{16}…",
        ):
            other.load_state_dict(wrong)
    with pytest.raises(
        ConfigError,
        match=r"base with digest [0-9a-f]{16}…, this policy has no frozen base",
    ):
        make_learner().load_state_dict(state)
    assert all_equal(masters_of(other), before)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_mixture_of_experts_learns_by_adapters(kind: str):
    """Contract: experts are adapted under their layer's name, routers are not.

    A backward reaches every adapter of a layer with tokens, and after a step the experts' codes are
    those of the merged stacks.
    """
    model = low_bit(random_moe(CONFIGS[kind]), "w8a8", torch.float32)
    before = stream_bytes(model)
    add_adapters(model, LORA, seed=0)
    stacks = [name for name in model.adapted if ".experts." in name]
    assert len(stacks) == 2 * len(model.experts)
    assert not any(name.endswith(("gate", "lm_head")) for name in model.adapted)
    tokens = torch.randint(
        3,
        512,
        (2, 20),
        generator=seeded(0),
    )
    model.head(
        model.hidden(tokens, torch.ones_like(tokens, dtype=torch.bool))
    ).square().mean().backward()
    with torch.no_grad():
        for name, master in model.masters.items():
            # B = 0 so far
            assert master.grad is not None and bool(master.grad.any()) == name.endswith("lora_B"), (
                name
            )
            master.sub_(master.grad.sign() * 1e-2)
    model.refresh()
    after = stream_bytes(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".experts.0." in name for name in moved)
    assert not any(
        n.endswith(("norm.weight", "gate.weight", "embed_tokens.weight", "lm_head.weight"))
        for n in moved
    )
    for layer, experts in model.experts.items():
        full = random_moe(CONFIGS[kind]).get_submodule(layer.replace("block_sparse_moe", "mlp"))
        for master, merged in zip(
            (full.gate_up_proj, full.down_proj), experts.merged(), strict=True
        ):
            assert isinstance(master, nn.Parameter)
            assert not torch.equal(master, merged)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        pytest.param(
            {"targets": "*.qproj"},
            "LoRA target '*.qproj' matches no linear layer of …; near it are '*.q_proj'",
            id="misspelled target",
        ),
        pytest.param(
            {"targets": "*.q_proj,lm_head"},
            "LoRA target 'lm_head' matches 'lm_head', which stays frozen: output heads",
            id="frozen head",
        ),
        pytest.param(
            {"targets": "first:3"},
            "LoRA target 'first:3' matches no linear layer of …; it has 2 decoder layers",
            id="more layers than there are",
        ),
        pytest.param(
            {"rank": 129},
            "rank 129 is beyond the smaller dimension of 'model.layers.…; take 128 at most",
            id="rank beyond the dimension",
        ),
    ],
)
def test_targets_and_ranks_that_do_not_fit_the_model_are_refused(
    lora: dict[str, Any], message: str
):
    with pytest.raises(LoraError, match=pattern(message)):
        adapted_weights(weight_shapes(random_model()), "qwen3", LoraConfig.model_validate(lora))


def test_targets_are_patterns_over_checkpoint_names():
    shapes = weight_shapes(random_model())
    found = adapted_weights(
        shapes,
        "qwen3",
        LoraConfig.model_validate({"rank": 2, "targets": "last:1,*.0.*.q_proj"}),
    )
    assert found[0] == "model.layers.0.self_attn.q_proj"
    assert len(found) == 8
    assert all(name.startswith("model.layers.1.") for name in found[1:])
    experts = weight_shapes(random_moe(CONFIGS["mixtral"]))
    down = adapted_weights(
        experts, "mixtral", LoraConfig.model_validate({"rank": 2, "targets": "*.w2"})
    )
    assert down == [f"model.layers.{i}.block_sparse_moe.experts.down_proj" for i in range(2)]
    for part in ("*.experts.1.*", "*.w1"):
        with pytest.raises(
            LoraError,
            match=r"take part of '.*\.(gate_up|down)_proj' and leave out .*experts\.\*'",
        ):
            adapted_weights(
                experts,
                "mixtral",
                LoraConfig.model_validate({"rank": 2, "targets": part}),
            )
    with pytest.raises(
        LoraError,
        match=r"'\*\.gate' matches 'model\.layers\.0\..*\.gate', which stays frozen",
    ):
        adapted_weights(
            experts,
            "mixtral",
            LoraConfig.model_validate({"rank": 2, "targets": "*.gate"}),
        )
