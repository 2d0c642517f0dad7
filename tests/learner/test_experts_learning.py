"""Learning with stacked experts: Muon on views. A run of theirs is killed and resumed in `tests/runs/test_train.py`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim.optimizer import MasterOptimizer, matrices_of
from qarl.quant.kernels.supported import require_support
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
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
    stacks = {
        "layers.0.mlp.experts.gate_up_proj": nn.Parameter(
            torch.randn(experts, 2 * inner, hidden, generator=generator).to(dtype)
        ),
        "layers.0.mlp.experts.down_proj": nn.Parameter(
            torch.randn(experts, hidden, inner, generator=generator).to(dtype)
        ),
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
    dtype = torch.bfloat16
    model = LowBitModel(random_moe(CONFIGS[kind]), get_scheme("w8a8"), LayerContext(dtype, "reference"))
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


@pytest.mark.parametrize(("kernel", "dtype"), [("reference", "bfloat16"), ("auto", "float16")])
def test_a_step_moves_the_experts_that_got_tokens(kernel: str, dtype: str):
    """From the loss to stepped masters through the whole model: gradients reach chosen experts and every router."""
    compute = COMPUTE_DTYPES[dtype]
    require_support(get_scheme("w8a8"), compute, experts=True)
    model = LowBitModel(random_moe(CONFIGS["qwen3_moe"]), get_scheme("w8a8"), LayerContext(compute, kernel))
    before = {name: master.detach().clone() for name, master in model.masters.items()}
    optimizer = MasterOptimizer(
        model.masters, model.matrices(), OptimizerConfig(name="muon", lr=0.01, weight_decay=0.0)
    )
    tokens = torch.tensor([[5]])
    model.logits(tokens, torch.ones_like(tokens, dtype=torch.bool)).float().logsumexp(-1).sum().backward()
    optimizer.step()
    moved = {
        e
        for e in range(5)
        for n, m in model.masters.items()
        if n.endswith("experts.down_proj") and (m[e] != before[n][e]).any()
    }
    assert len(moved) == 2, "one token, two experts"
    assert (model.masters["model.layers.1.mlp.gate.weight"] != before["model.layers.1.mlp.gate.weight"]).any()
