"""What `qarl bench launches` counts: of small calls by hand, and of a whole step the contract of docs/cuda.md."""

import pytest
import torch

from qarl.bench.launches import measure
from qarl.bench.launches.tally import Tally
from qarl.learner.optim.stacked_muon import StackedMuon
from tests.support.tensors import normal, relative_error

SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 4,
}  # fmt: skip
DENSE = {**SMALL, "model_type": "qwen3"}
EXPERTS = {**SMALL, "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts_per_tok": 2}


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted of a layer does not depend on how many."""
    answers = range(4, 12)
    for name, value in {"SEQUENCES": 8, "ANSWERS": answers, "TOKENS": 8 * measure.PROMPT + sum(answers)}.items():
        monkeypatch.setattr(measure, name, value)


def test_launches_bytes_and_waits_are_counted():
    with Tally() as tally:
        x = torch.ones(10, 4).to("meta")  # copied: a launch, and a wait
        mask = (torch.arange(10) < 3).to("meta")
        y = x.view(20, 2).add(1.0)  # a launch
        assert x[mask].shape == (3, 4)  # a launch and a wait
        assert float(y.sum()) == 80.0  # a launch and a wait
    assert (tally.launches, tally.waits) == (5, 4)
    copied, rows = 160 + 10, 3 * 16
    assert tally.bytes == copied + 2 * 160 + (2 * rows + 10) + (160 + 4)


def test_the_host_waits_for_no_layer(few_tokens: None):
    """Contract: a layer adds launches, and no wait. Before, materializing asked twice a matrix."""
    one, two = (measure.count_step(DENSE, layers, "w8a8", False) for layers in (1, 2))
    assert two.waits == one.waits > 0 and two.launches > one.launches + 100


def test_neither_for_an_expert_nor_are_there_kernels_for_each(few_tokens: None):
    """Contract: four times the experts, not a wait more, and no tenth more launches."""
    few, many = (measure.count_step({**EXPERTS, "num_experts": n}, 1, "w4a16", False) for n in (8, 32))
    assert few.waits == many.waits and many.launches < 1.1 * few.launches


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_of_a_stack_is_muon_of_each(shape: tuple[int, int]):
    """Contract: torch's Muon, but for last bits of bfloat16 products; its state too."""
    settings = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    steps = []
    for kind in (torch.optim.Muon, StackedMuon):
        parameters = [torch.nn.Parameter(normal(*shape, seed=seed)) for seed in range(5)]
        optimizer = kind(parameters, **settings)
        for number in range(2):
            for seed, parameter in enumerate(parameters[:4]):
                parameter.grad = normal(*shape, seed=10 * number + seed)
            optimizer.step()
        steps.append(([p.detach() for p in parameters], [dict(optimizer.state[p]) for p in parameters]))
    for (one, other), seed in zip(zip(*(values for values, _ in steps), strict=True), range(5), strict=True):
        start = normal(*shape, seed=seed)
        assert torch.equal(one, other) if seed == 4 else relative_error(other - start, one - start) < 0.02
    for one, other in zip(*(states for _, states in steps), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
