"""Tests of torch.compile for passes over tensors, with any number of kinds in a process.

They use the eager backend, so they need no compiler.
"""

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from qarl.quant.materialize import by_operators
from qarl.quant.materialize.weight import _multiplied
from qarl.quant.runtime import compile as runtime
from qarl.quant.schemes import SCHEMES, Scheme, get_scheme
from tests.support.learners import VOCABULARY, logprob_gradients, policy, random_batch
from tests.support.operators import make_operator
from tests.support.profiles import thorough
from tests.support.tensors import as_bytes

LIMIT = 8
"""Torch's limit on compilations of one code object (`torch._dynamo.config.recompile_limit`)."""

ONE_PASS = [
    s
    for s in map(get_scheme, SCHEMES)
    if s.weights and (s.weights.type == "int" or s.weights.num_bits == 8)
]
"""Schemes whose codes one compiled pass makes: all except `bf16` and those of 4-bit floats."""
KINDS = list(product(ONE_PASS, (torch.float32, torch.bfloat16, torch.float16)))
_FEW_SCHEMES = ("w4a16-g32", "w4a16-channel", "w8a8", "w4a8", "fp8")
FEW = [
    (scheme, dtype)
    for scheme, dtype in KINDS
    if scheme.name in _FEW_SCHEMES and dtype != torch.float16
]


def graphs() -> int:
    """Return the number of graphs that dynamo has traced since it was reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def made(
    scheme: Scheme, master: torch.dtype, shape: tuple[int, int], compiles: bool
) -> torch.Tensor:
    values = torch.linspace(-1.0, 1.0, math.prod(shape)).sin()
    weight = values.view(shape).to(master)
    return as_bytes(by_operators(weight, scheme, torch.bfloat16, "layer", compiles=compiles).codes)


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let dynamo trace, guard and count as usual, and run the traced graphs by
    torch's operators.
    """
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    traced = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, options, **how: traced(function, backend="eager", **how),
    )
    runtime.compiled.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    runtime.compiled.cache_clear()
    torch._dynamo.reset()


def test_schemes_compile_in_one_process(eager_backend: None):
    """Contract: more combinations of scheme and dtypes than torch compiles for one function all
    compile, each once and with the operators' bits. A second shape compiles once more, further
    shapes do not. `make test-thorough` covers every scheme with every master dtype. Blind spot:
    Triton's code (tests/quant/test_fused.py runs it on a GPU).
    """
    kinds = KINDS if thorough() else FEW
    assert len(kinds) > LIMIT == torch._dynamo.config.recompile_limit
    for scheme, master in kinds:
        assert torch.equal(
            *(made(scheme, master, (128, 256), compiles) for compiles in (True, False))
        ), scheme.name
    assert graphs() <= len(kinds)
    before = graphs()
    for rows in (256, 384, 512):
        compiled = made(*kinds[0], (rows, 256), compiles=True)
        assert torch.equal(compiled, made(*kinds[0], (rows, 256), compiles=False))
    assert graphs() - before <= 1


def test_codes_are_dequantized_in_one_pass(eager_backend: None):
    """Contract: each scheme and dtype has one graph for any number of rows, with the operators'
    bits. Blind spot: Triton's code.
    """
    names = [name for name in SCHEMES if get_scheme(name).weights]
    for rows, name, dtype in product(
        (128, 256, 384),
        names,
        (
            torch.bfloat16,
            torch.float32,
        ),
    ):
        weight = (
            torch.linspace(-1.0, 1.0, rows * 256)
            .sin()
            .view(
                rows,
                256,
            )
        )
        low_bit = by_operators(weight, get_scheme(name), torch.bfloat16, "layer")
        height = low_bit.scheme.block[0] if low_bit.scheme.block else 1
        operands = (
            low_bit.codes,
            low_bit.scale,
            low_bit.global_scale,
            low_bit._bits,
            height,
            dtype,
        )
        assert torch.equal(runtime.compiled(_multiplied)(*operands), low_bit.dequantized(dtype)), (
            name
        )
    assert graphs() <= 4 * len(names)


def test_a_backward_compiles_for_every_number_of_tokens_at_once(eager_backend: None):
    """Contract: norms and gates of all layers compile once for the first number of tokens, once
    more for any other number, and never again.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    kinds = (lambda: RMSNorm(64), SiluAndMul)
    counts = []
    layers = [make_operator(kind, torch.float32, compiled=True) for kind in 3 * kinds]
    for tokens in (9, 20, 19, 30):
        for operator in layers:
            x = torch.linspace(-1.0, 1.0, tokens * 64).view(tokens, 64).requires_grad_()
            operator(x).sum().backward()
        counts.append(graphs())
    assert counts == [2, 4, 4, 4]


@pytest.mark.skipif(not thorough(), reason="the same of a whole learner: make test-thorough")
def test_a_learner_compiles_no_more_after_its_second_micro_batch(eager_backend: None):
    model = policy("w4a16")
    model.context.gradients.compiled = True
    counts = []
    for lengths in (
        [9],
        [17, 3],
        [5, 6, 8],
        [30],
        [2, 40],
    ):
        batch = random_batch(lengths, VOCABULARY)
        logprob_gradients(model, batch, packed=batch.packed())
        counts.append(graphs())
    assert 0 < counts[0] < counts[1] <= 2 * counts[0], counts
    assert len(set(counts[1:])) == 1, counts
