"""Fused experts → every expert's low-bit tensors, held against compressed-tensors on that expert's own matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.quant.checkpoint.families import ExpertLayout
from qarl.quant.materialize.experts import materialize_experts
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, get_scheme
from tests.support.library import library
from tests.support.profiles import examples
from tests.support.tensors import heavy, same_bits

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def masters(experts: int, inner: int, hidden: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [E, 2I, H] and [E, H, I]."""
    gate_up = heavy(experts, 2 * inner, hidden, seed=seed, rows=False) * 0.05
    return gate_up, heavy(experts, hidden, inner, seed=seed + 2, rows=False) * 0.05


@st.composite
def stacks(draw: st.DrawFn, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Masters [E, 2I, H] and [E, H, I]: experts of different magnitudes, one of zeros, in fp32 or bf16."""
    step = max(get_scheme(scheme).group_size or 8, 8)
    experts, inner, hidden = draw(st.integers(1, 6)), step * draw(st.integers(1, 2)), step * draw(st.integers(1, 2))
    seed = draw(st.integers(0, 2**32 - 1))
    size = 10.0 ** torch.randint(-2, 3, (experts, 1, 1), generator=torch.Generator().manual_seed(seed))
    gate_up, down = (stack * size for stack in masters(experts, inner, hidden, seed))
    if draw(st.booleans()):
        gate_up[draw(st.integers(0, experts - 1))] = 0
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    return gate_up.to(dtype), down.to(dtype)


def expected(gate_up: torch.Tensor, down: torch.Tensor, scheme: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By compressed-tensors, expert by expert and matrix by matrix; NVFP4's tensor-wide scale spans gate and up."""
    found = get_scheme(scheme)
    rows, tensors = gate_up.shape[1] // 2, {}
    for e in range(len(gate_up)):
        parts = dict(zip(PROJECTIONS, (gate_up[e, :rows], gate_up[e, rows:], down[e]), strict=True))
        if found.quantization is None:
            tensors |= {f"{e}.{name}.weight": part.to(dtype) for name, part in parts.items()}
            continue
        both = library(gate_up[e], found, dtype)
        for name, part in parts.items():
            written = library(part, found, dtype)
            if found.fuses_scales and name != "down_proj":
                cut = slice(0, rows) if name == "gate_proj" else slice(rows, None)
                written = {k: v[cut] if v.ndim == 2 else v for k, v in both.items()}
            tensors |= {f"{e}.{name}.{suffix}": tensor for suffix, tensor in written.items()}
    return tensors


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values(), ids=COMPUTE_DTYPES)
@given(data=st.data())
@settings(max_examples=examples(8))
def test_every_experts_tensors_are_the_librarys(scheme: str, dtype: torch.dtype, data: st.DataObject):
    """Contract: names, dtypes, shapes and bytes are those compressed-tensors writes for the expert's matrix alone: one
    pass over a stack lets no expert's scale see another's weights. Magnitudes of experts differ by up to 10^4."""
    gate_up, down = data.draw(stacks(scheme))
    low_bit = materialize_experts(gate_up, down, get_scheme(scheme), dtype, "layer")
    theirs = expected(gate_up, down, scheme, dtype)
    assert same_bits(sorted(low_bit.tensors(ExpertLayout())), sorted(theirs.items()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_views_of_one_buffer_a_stack(scheme: str):
    """Nothing is copied between what the forward multiplies and what is published; NVFP4, whose scale spans a matrix,
    has a buffer an expert."""
    low_bit = materialize_experts(*masters(3, 128, 128, seed=0), get_scheme(scheme), torch.bfloat16, "layer")
    single = not get_scheme(scheme).fuses_scales
    for part in ("gate_up", "down"):
        weights = [getattr(expert, part) for expert in low_bit.experts]
        assert len({w.codes.untyped_storage().data_ptr() for w in weights}) == (1 if single else 3)
    for expert in low_bit.experts:
        streamed = dict(expert.tensors(ExpertLayout()))
        for name, tensor in streamed.items():
            source = expert.down if name.startswith("down") else expert.gate_up
            if name.endswith((".weight", ".weight_packed")):
                assert tensor.untyped_storage().data_ptr() == source.codes.untyped_storage().data_ptr()
            if name.endswith(".weight_scale"):
                assert source.scale is not None
                assert tensor.untyped_storage().data_ptr() == source.scale.untyped_storage().data_ptr()


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "bf16"])
def test_one_bad_weight_among_all_experts_is_refused(scheme: str):
    gate_up, down = masters(3, 128, 128, seed=2)
    down[2, 100, 50] = float("nan")
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.experts': a master weight holds NaN"):
        materialize_experts(gate_up, down, get_scheme(scheme), torch.bfloat16, "model.layers.0.mlp.experts")
