"""Learning with stacked experts: Muon on views. A run of theirs is killed and resumed in `tests/runs/test_train.py`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim.optimizer import MasterOptimizer, matrices_of
from tests.support.models import low_bit
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.profiles import examples


def separate(stacked: nn.Parameter, rows: int) -> list[nn.Parameter]:
    """Each matrix of `rows` rows as a parameter of its own."""
    return [nn.Parameter(part.clone()) for expert in stacked.detach() for part in expert.split(rows)]


@given(
    experts=st.integers(1, 5),
    inner=st.sampled_from([8, 24]),
    hidden=st.sampled_from([8, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=examples(20))
def test_muon_on_stacks_is_muon_on_matrices(experts: int, inner: int, hidden: int, dtype: torch.dtype, seed: int):
    """Contract: five steps on [E, 2I, H] and [E, H, I] equal, bit for bit, those on every expert's gate, up and down as
    2-D parameters: each matrix is orthogonalized alone. Includes steps without a gradient for one expert (zeros), and
    a state that is saved and loaded half way."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
    stacks = {
        f"layers.0.mlp.experts.{name}": nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }
    rows = (inner, hidden)
    matrices = [separate(stack, r) for stack, r in zip(stacks.values(), rows, strict=True)]
    alone = {str(i): p for i, p in enumerate(p for parts in matrices for p in parts)}
    config = OptimizerConfig(name="muon", lr=0.05, weight_decay=0.1, rounding="nearest")
    ours, theirs = MasterOptimizer(stacks, set(stacks), config), MasterOptimizer(alone, set(alone), config)
    for step in range(5):
        for stack, parts, r in zip(stacks.values(), matrices, rows, strict=True):
            stack.grad = torch.randn(stack.shape, generator=generator)
            stack.grad[step % experts] = 0
            for part, grad in zip(parts, (g for e in stack.grad for g in e.split(r)), strict=True):
                part.grad = grad.clone()
        if step == 3:
            state = ours.state_dict()
            ours = MasterOptimizer(stacks, set(stacks), config)
            ours.load_state_dict(state)
        for optimizer in (ours, theirs):
            optimizer.lr = 0.05 * (0.5 + step / 10)
            optimizer.step()
            optimizer.zero_grad()
    for stack, parts, r in zip(stacks.values(), matrices, rows, strict=True):
        now = [part for expert in stack.detach() for part in expert.split(r)]
        assert all(torch.equal(a, b.detach()) for a, b in zip(now, parts, strict=True))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe"])
def test_which_matrices_muon_takes(kind: str):
    """Experts, shared experts and attention; no router, embedding or output head."""
    model = low_bit(random_moe(CONFIGS[kind]), "w8a8")
    taken = model.matrices()
    left = {name for name, master in model.masters.items() if master.ndim > 1} - taken
    routers = {name for name in model.masters if name.endswith((".gate.weight", ".shared_expert_gate.weight"))}
    assert {n for n, m in model.masters.items() if m.ndim == 3} <= taken
    assert left - routers == {"model.embed_tokens.weight", "lm_head.weight"}
    assert not {name for name in routers if name.endswith(".gate.weight")} & taken
    for name in taken:
        master = model.masters[name]
        covered = sum(master.detach()[index].numel() for index in matrices_of(name, master.shape))
        assert covered == master.numel(), name
