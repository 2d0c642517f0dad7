"""Tests of the optimizer: torch's own steps, rounding of 16-bit masters, fp32 moments and
gradients, offload of its state.
"""

import io
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim import rounding
from qarl.learner.optim.muon import StackedMuon
from qarl.learner.optim.optimizer import MasterOptimizer, matrices_of
from qarl.learner.optim.parameter_optimizer import ParameterOptimizer
from qarl.learner.optim.rounding import stochastic_round
from tests.support.models import low_bit
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.profiles import examples
from tests.support.tensors import normal, pairwise_equal, seeded

NARROW = (torch.bfloat16, torch.float16)
narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)
roundings = pytest.mark.parametrize("how", ["nearest", "stochastic"])
optimizers = pytest.mark.parametrize("name", ["muon", "adamw"])
SHAPES = {
    "embed": (11, 6),
    "up": (8, 6),
    "experts.gate_up_proj": (2, 8, 6),
    "norm": (6,),
}
MATRICES = {"up", "experts.gate_up_proj"}


def masters_in(dtype: torch.dtype, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = seeded(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def give_gradients(masters: dict[str, nn.Parameter], seed: int) -> None:
    generator = seeded(seed)
    for p in masters.values():
        p.grad = torch.randn(p.shape, generator=generator)


def config(**options: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"lr": 0.02, "weight_decay": 0.1, **options})


@narrow
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-6, 4),
)
@settings(max_examples=examples(20))
def test_stochastic_rounding_is_exact_in_expectation(dtype: torch.dtype, seed: int, exponent: int):
    """Contract: over all 2^16 values of the noise, the mean of the rounded numbers is exactly the
    fp32 value (sums of 2^16 such numbers are exact in fp64), and each of them is one of its two
    neighbours. Blind spot: the noise's distribution; the next test draws it.
    """
    generator = seeded(seed)
    values = torch.randn(8, generator=generator) * 10.0**exponent
    values = torch.where(
        values.abs() < 2.0**-14,
        values.sign() * 2.0**-14,
        values,
    )
    noise = torch.arange(1 << 16, dtype=torch.int32)
    for value in values:
        same = value.expand(1 << 16).clone()
        with mock.patch.object(rounding, "_random_16_bits", return_value=noise.clone()):
            rounded = stochastic_round(same, dtype, generator).double()
        assert rounded.mean() == value.double()
        assert rounded.min() <= value <= rounded.max()
        assert len(rounded.unique()) <= 2
        assert rounded.max() - rounded.min() <= abs(value) * torch.finfo(dtype).eps


@narrow
def test_stochastic_rounding_draws_unbiased_and_repeatable_noise(dtype: torch.dtype):
    """Contract: the mean of 200,000 draws is within 5 standard errors, for numbers of every
    magnitude including float16's subnormal ones. Exact values and infinities do not change, and a
    generator repeats itself.
    """
    spacing = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for value in (1.001, -0.0203, 3.1e-4, 2.0**-14 * 1.0001, -4.3e-5, 1.3e-7, -2.0e-8):
        same = torch.full((200_000,), value)
        step = max(
            abs(value) * 2 * spacing,
            2.0**-24 * (dtype == torch.float16),
        )
        rounded = stochastic_round(same, dtype, seeded(1))
        error = rounded.double().mean() - same[0].double()
        assert abs(error) < 5 * step / 2 / 200_000**0.5, value
        assert torch.equal(rounded, stochastic_round(same, dtype, seeded(1)))
        assert not torch.equal(rounded, stochastic_round(same, dtype, seeded(2)))
    exact = torch.tensor(
        [
            0.0,
            1.5,
            -(2.0**-20),
            torch.inf,
            -torch.inf,
        ]
    )
    assert torch.equal(stochastic_round(exact, dtype, torch.Generator()).float(), exact)
    nan = torch.tensor([torch.nan])
    assert stochastic_round(nan, dtype, torch.Generator()).isnan().all()


@narrow
@optimizers
@roundings
def test_a_16_bit_step_is_torchs_step_in_fp32_rounded_once(dtype: torch.dtype, name: str, how: str):
    """Contract: three steps equal, bit for bit, widening the master, stepping with torch's own
    optimizer and fp32 moments, and rounding.
    """
    settings_ = config(name=name, rounding=how)
    masters = masters_in(dtype)
    expected = {k: v.detach().clone() for k, v in masters_in(dtype).items()}
    ours = MasterOptimizer(masters, MATRICES, settings_)
    wide = {k: nn.Parameter(v.float()) for k, v in expected.items()}
    theirs = {
        k: ParameterOptimizer(v, _matrices(name, k, v), settings_, "nearest", None)
        for k, v in wide.items()
    }
    generator = seeded(0)
    for step in range(3):
        give_gradients(masters, step)
        ours.step()
        for key, parameter in wide.items():
            parameter.data = expected[key].float()
        give_gradients(wide, step)
        for key, stepper in theirs.items():
            stepper.step(0.02)
            if how == "stochastic":
                expected[key] = stochastic_round(wide[key].detach(), dtype, generator)
            else:
                expected[key] = wide[key].detach().to(dtype)
        assert all(torch.equal(masters[k], expected[k]) for k in SHAPES)


def _matrices(name: str, key: str, master: nn.Parameter) -> list[Any]:
    return list(matrices_of(key, master.shape)) if name == "muon" and key in MATRICES else []


@optimizers
def test_muon_takes_linear_matrices_and_adamw_the_rest(name: str):
    """Contract: after three steps each master equals, bit for bit, the result of torch's own Muon
    (matrices of linear layers) or AdamW (embeddings, heads, norms) at the configured rate times the
    step's factor.
    """
    masters, expected = (masters_in(torch.float32) for _ in range(2))
    for each in (masters, expected):
        del each["experts.gate_up_proj"]
    settings_ = config(name=name, momentum=0.8)
    # norm is no matrix, whatever the name list says
    ours = MasterOptimizer(masters, {"up", "norm"}, settings_)
    by_muon = [expected["up"]] if name == "muon" else []
    muon_options: dict[str, Any] = {"momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
    rest = [p for p in expected.values() if not any(p is other for other in by_muon)]
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, 0.02, settings_.betas, weight_decay=0.1, fused=True),
        *(torch.optim.Muon([p], 0.02, 0.1, **muon_options) for p in by_muon),
    ]
    for step, factor in enumerate((0.5, 1.0, 0.25)):
        give_gradients(masters, step)
        give_gradients(expected, step)
        ours.lr = 0.02 * factor
        ours.step()
        for optimizer in theirs:
            optimizer.param_groups[0]["lr"] = 0.02 * factor
            optimizer.step()
    for key, master in masters.items():
        assert torch.equal(master, expected[key]), key
        assert not torch.equal(master, masters_in(torch.float32)[key])


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@optimizers
@roundings
def test_a_restored_optimizer_continues_bit_for_bit(dtype: torch.dtype, name: str, how: str):
    """Contract: two steps, save, load and two more equal four steps; the state includes the
    generator's. An optimizer without the loaded state ends elsewhere, so the state matters.
    """
    settings_ = config(name=name, rounding=how)
    masters = masters_in(dtype)
    optimizer = MasterOptimizer(masters, MATRICES, settings_)
    for step in range(2):
        give_gradients(masters, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(
        {
            "masters": {k: p.detach() for k, p in masters.items()},
            "optimizer": optimizer.state_dict(),
        },
        file,
    )
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others = {k: nn.Parameter(v.clone()) for k, v in saved["masters"].items()}
    fresh = {k: nn.Parameter(v.clone()) for k, v in saved["masters"].items()}
    other, without = (MasterOptimizer(params, MATRICES, settings_) for params in (others, fresh))
    other.load_state_dict(saved["optimizer"])
    for step in (2, 3):
        for params, stepper in (
            (masters, optimizer),
            (others, other),
            (fresh, without),
        ):
            give_gradients(params, step)
            stepper.step()
    assert all(torch.equal(masters[k], others[k]) for k in SHAPES)
    assert not any(torch.equal(masters[k], fresh[k]) for k in SHAPES)


@roundings
def test_small_updates_arrive_except_with_nearest(how: str):
    """Contract: 200 steps of AdamW at 1e-6 with a gradient of constant sign move the mean of bf16
    weights around 0.02 by 2e-4. Half the spacing of these weights is 6e-5 or 3e-5, so rounding to
    nearest loses every update.
    """
    start = torch.full((4096,), 0.02).bfloat16()
    master = nn.Parameter(start.clone())
    optimizer = MasterOptimizer(
        {"w": master},
        set(),
        config(name="adamw", lr=1e-6, weight_decay=0.0, rounding=how),
    )
    lost = []
    for _ in range(200):
        master.grad = torch.ones(4096)
        arrived = optimizer.step(diagnose=True)
        assert arrived is not None
        lost.append(arrived.lost)
    moved = float((start.double() - master.detach().double()).mean())
    if how == "nearest":
        assert moved == 0.0
        assert lost == [1.0] * 200
    else:
        assert moved == pytest.approx(2e-4, rel=0.02)
        assert 0.9 < sum(lost) / 200 < 1.0


def test_lost_updates_by_hand():
    """Contract: of four fp32 weights 2^30, 1, 1 and 1 with gradients 1, 1, 0 and -1, three have a
    momentum. The first, whose neighbours are 64 away, loses its update of 0.02.
    """
    master = nn.Parameter(torch.tensor([2.0**30, 1.0, 1.0, 1.0]))
    optimizer = MasterOptimizer({"w": master}, set(), config(name="adamw", weight_decay=0.0))
    master.grad = torch.tensor([1.0, 1.0, 0.0, -1.0])
    arrived = optimizer.step(diagnose=True)
    assert arrived is not None
    assert arrived.lost == pytest.approx(1 / 3)
    # 0.02 is beyond a neighbour's half of 1, far within that of 2^30
    assert arrived.crossed == 2
    assert arrived.weights == 4
    assert optimizer.step() is None


@narrow
def test_gradients_of_16_bit_masters_are_accumulated_in_fp32(dtype: torch.dtype):
    """Contract: 1e-9 (zero in float16) survives, and 1 + 1000 times 2^-10 (each lost in bfloat16)
    adds up.
    """
    master = nn.Parameter(torch.ones(2, dtype=dtype))
    MasterOptimizer({"w": master}, set(), config(name="adamw"))
    weights = [
        torch.tensor([1e-9, 1.0]),
        *[torch.tensor([1e-9, 2.0**-10])] * 1000,
    ]
    for weight in weights:
        (master.float() * weight).sum().backward()
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    # The product's backward is float32, the cast's is in the master's dtype: low-bit layers skip
    # the cast.
    assert float(master.grad[1]) == pytest.approx(1 + 1000 / 1024)


@optimizers
def test_offloaded_moments_change_no_bit(name: str):
    """Contract: moments that are fetched for a step and offloaded again give the same bits as
    moments that stay. Between steps they are in the offload buffers, whose addresses do not change.
    Blind spot: both devices are the CPU here.
    """
    settings_ = config(name=name)
    stay = masters_in(torch.bfloat16)["up"]
    visit = masters_in(torch.bfloat16)["up"]
    steps = [
        ParameterOptimizer(m, _matrices(name, "up", m), settings_, "nearest", None, home)
        for m, home in ((stay, None), (visit, torch.device("cpu")))
    ]
    addresses = set()
    for seed in range(3):
        for master, step in zip((stay, visit), steps, strict=True):
            master.grad_dtype = torch.float32
            give_gradients({"up": master}, seed)
            step.step(0.02)
        addresses.add(tuple(tensor.data_ptr() for _, _, tensor in steps[1]._moments()))
    assert torch.equal(stay, visit)
    assert len(addresses) == 1
    again = ParameterOptimizer(
        visit,
        _matrices(name, "up", visit),
        settings_,
        "nearest",
        None,
        torch.device("cpu"),
    )
    again.load_moments(steps[1].moments())
    restored = [tensor for _, _, tensor in again._moments()]
    stayed = [tensor for _, _, tensor in steps[0]._moments()]
    assert pairwise_equal(restored, stayed)


def test_offload_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"offload 'cpu' moves .* on the CPU already"):
        MasterOptimizer(masters_in(torch.float32), MATRICES, config(offload="cpu"))


def test_rounding_defaults_to_nearest_in_fp32_and_stochastic_in_16_bits():
    assert [OptimizerConfig().rounding_of(d) for d in ("float32", "bfloat16", "float16")] == [
        "nearest",
        "stochastic",
        "stochastic",
    ]
    assert config(rounding="nearest").rounding_of("bfloat16") == "nearest"


def test_gradient_norm_covers_all_masters_and_shows_non_finite_gradients():
    """Contract: the norm is global over all masters (3, 4 and 12 give 13), skips masters without
    gradient, and is non-finite if any gradient is. Gradients of float16 masters are fp32, so a norm
    of 90000, beyond float16, does not overflow.
    """
    masters = {k: nn.Parameter(torch.zeros(2, 2)) for k in "abcd"}
    optimizer = MasterOptimizer(masters, {"a"}, OptimizerConfig())
    assert optimizer.gradient_norm() == 0.0
    for key, value in (("a", 3.0), ("b", 4.0), ("c", 12.0)):
        masters[key].grad = torch.tensor([[0.0, value], [0.0, 0.0]])
    assert optimizer.gradient_norm() == pytest.approx(13.0)
    assert masters["d"].grad is None
    for bad in (math.inf, -math.inf, math.nan):
        masters["b"].grad = torch.tensor([[0.0, 1.0], [bad, 0.0]])
        assert not math.isfinite(optimizer.gradient_norm())
    optimizer.zero_grad()
    assert all(p.grad is None for p in masters.values())
    narrow = {"a": nn.Parameter(torch.zeros(300, 300, dtype=torch.float16))}
    optimizer = MasterOptimizer(narrow, set(), OptimizerConfig())
    weights = torch.full((300, 300), 300.0)
    (narrow["a"] * weights).sum().backward()
    assert optimizer.gradient_norm() == pytest.approx(90000.0, rel=1e-3)


def test_stacked_muon_moves_each_matrix_as_torchs_does():
    """Contract: the batched Muon that steps a layer's experts on a GPU gives torch's momenta bit
    for bit, and torch's masters up to bfloat16's last bits.
    """
    settings: dict[str, Any] = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.8,
        "adjust_lr_fn": "match_rms_adamw",
    }
    stacked = [nn.Parameter(normal(8, 12, seed=n)) for n in range(3)]
    alone = [nn.Parameter(normal(8, 12, seed=n)) for n in range(3)]
    optimizers = StackedMuon(stacked, **settings), torch.optim.Muon(alone, **settings)
    for step in range(3):
        for number, pair in enumerate(zip(stacked, alone, strict=True)):
            for parameter in pair:
                parameter.grad = normal(8, 12, seed=10 * step + number)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(stacked, alone, strict=True):
        ours = optimizers[0].state[a]["momentum_buffer"]
        theirs = optimizers[1].state[b]["momentum_buffer"]
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


def separate(stacked: nn.Parameter, rows: int) -> list[nn.Parameter]:
    """Return each matrix of `rows` rows as a separate parameter."""
    return [
        nn.Parameter(part.clone()) for expert in stacked.detach() for part in expert.split(rows)
    ]


@given(
    experts=st.integers(1, 5),
    inner=st.sampled_from([8, 24]),
    hidden=st.sampled_from([8, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=examples(20))
def test_muon_on_stacks_is_muon_on_matrices(
    experts: int, inner: int, hidden: int, dtype: torch.dtype, seed: int
):
    """Contract: five steps on [E, 2I, H] and [E, H, I] equal, bit for bit, those on every expert's
    gate, up and down as 2-D parameters, because each matrix is orthogonalized by itself. This
    includes steps with a zero gradient for one expert and a state that is saved and loaded half
    way.
    """
    generator = seeded(seed)
    shapes = {
        "gate_up_proj": (experts, 2 * inner, hidden),
        "down_proj": (experts, hidden, inner),
    }
    stacks = {
        f"layers.0.mlp.experts.{name}": nn.Parameter(
            torch.randn(shape, generator=generator).to(dtype)
        )
        for name, shape in shapes.items()
    }
    rows = (inner, hidden)
    matrices = [separate(stack, r) for stack, r in zip(stacks.values(), rows, strict=True)]
    alone = {str(i): p for i, p in enumerate(p for parts in matrices for p in parts)}
    how = OptimizerConfig(name="muon", lr=0.05, weight_decay=0.1, rounding="nearest")
    ours = MasterOptimizer(stacks, set(stacks), how)
    theirs = MasterOptimizer(alone, set(alone), how)
    for step in range(5):
        for stack, parts, r in zip(stacks.values(), matrices, rows, strict=True):
            stack.grad = torch.randn(stack.shape, generator=generator)
            stack.grad[step % experts] = 0
            gradients = [gradient for expert in stack.grad for gradient in expert.split(r)]
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient.clone()
        if step == 3:
            state = ours.state_dict()
            ours = MasterOptimizer(stacks, set(stacks), how)
            ours.load_state_dict(state)
        for optimizer in (ours, theirs):
            optimizer.lr = 0.05 * (0.5 + step / 10)
            optimizer.step()
            optimizer.zero_grad()
    for stack, parts, r in zip(stacks.values(), matrices, rows, strict=True):
        now = [part for expert in stack.detach() for part in expert.split(r)]
        assert pairwise_equal(now, [part.detach() for part in parts])


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe"])
def test_muon_takes_experts_and_attention_but_no_router_embedding_or_head(kind: str):
    """Contract: Muon steps experts, shared experts and attention, but no router, embedding or
    output head.
    """
    model = low_bit(random_moe(CONFIGS[kind]), "w8a8")
    taken = model.matrices()
    left = {name for name, master in model.masters.items() if master.ndim > 1} - taken
    routers = {
        name
        for name in model.masters
        if name.endswith((".gate.weight", ".shared_expert_gate.weight"))
    }
    assert {n for n, m in model.masters.items() if m.ndim == 3} <= taken
    assert left - routers == {"model.embed_tokens.weight", "lm_head.weight"}
    assert not {name for name in routers if name.endswith(".gate.weight")} & taken
    for name in taken:
        master = model.masters[name]
        matrices = [master.detach()[index] for index in matrices_of(name, master.shape)]
        covered = sum(matrix.numel() for matrix in matrices)
        assert covered == master.numel(), name
