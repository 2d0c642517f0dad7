"""torch.compile of passes over tensors: any number of kinds in a process. By the eager backend, without a compiler."""

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from quant.materialize import by_operators
from quant.runtime import compile as runtime
from quant.schemes import get_scheme
from tests.support.tensors import as_bytes

LIMIT = 8
"""Of torch: compilations of one code object (`torch._dynamo.config.recompile_limit`)."""


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo traces, guards and counts as ever; what it traced then runs as torch's operators."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    traced = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options, **how: traced(function, backend="eager", **how))
    runtime.compiled.cache_clear()
    yield
    runtime.compiled.cache_clear()
    torch._dynamo.reset()


def test_every_scheme_compiles_in_one_process(eager_backend: None):
    """Contract: more combinations of scheme and dtypes than torch compiles one function for, each with the operators'
    bits. Blind spot: Triton's code (tests/quant/test_fused.py has it, on a GPU)."""
    kinds = list(product(("w4a16-g32", "w4a16-channel", "w8a8", "w4a8", "fp8"), (torch.float32, torch.bfloat16)))
    assert len(kinds) > LIMIT == torch._dynamo.config.recompile_limit
    shapes = [(2, 128)] * len(kinds) + [(6, 128), (6, 256)]
    for (name, master), shape in zip([*kinds, kinds[0], kinds[0]], shapes, strict=True):
        weight = torch.linspace(-1.0, 1.0, math.prod(shape)).sin().view(shape).to(master)
        made, expected = (
            by_operators(weight, get_scheme(name), torch.bfloat16, "layer", compiles=compiles)
            for compiles in (True, False)
        )
        assert torch.equal(as_bytes(made.codes), as_bytes(expected.codes)), (name, master, shape)
