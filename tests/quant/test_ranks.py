"""Layers as the ranks of a tensor-parallel engine multiply them, against vLLM's own parallel layers
of each rank.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
)

from qarl.configs.errors import ConfigError
from qarl.configs.schemes import SCHEME_SPECS, Codes
from qarl.quant import schemes
from qarl.quant.checkpoint.families import family_of
from qarl.quant.kernels import vllm as our_vllm
from qarl.quant.kernels.activations import multiplied_activation
from qarl.quant.kernels.ranks import experts_of_ranks, row_parallel, sum_of_ranks
from qarl.quant.kernels.supported import packs_bias, shape_refusal
from qarl.quant.kernels.vllm import VllmFactory, VllmMatmul
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.materialize.experts import materialize_experts
from qarl.quant.model.ranks import _experts_misfits
from qarl.quant.runtime.replaced import replaced
from qarl.quant.schemes import get_scheme
from tests.support import Policies
from tests.support.engines import make_model
from tests.support.kernels import VLLM_CPU_KERNELS, no_cuda
from tests.support.layers import EXPERTS, SHAPE, layer_gradients, routed
from tests.support.profiles import examples
from tests.support.tensors import heavy, normal

SCHEMES = ("bf16", *VLLM_CPU_KERNELS)
BF16 = torch.bfloat16


def of_rank(rank: int, ranks: int) -> Any:
    """Return a context within which vLLM's layers are built as those of one rank."""
    group = SimpleNamespace(**vars(our_vllm._ALONE))
    vars(group).update(rank=rank, rank_in_group=rank, ranks=[*range(ranks)], world_size=ranks)
    names = {name: group for name in our_vllm._GROUPS if hasattr(parallel_state, name)}
    return replaced(parallel_state, **names)


def rank_layer(
    factory: VllmFactory,
    weights: Sequence[LowBitWeight],
    bias: torch.Tensor | None,
    rank: int,
    ranks: int,
    build: Callable[..., LinearBase],
) -> VllmMatmul:
    """Return one rank's layer as a tensor-parallel vLLM builds and loads it."""
    with factory._loading(torch.device("cpu")), of_rank(rank, ranks):
        layer: Any = build(
            quant_config=factory._quant_config(weights[0].scheme),
            params_dtype=factory._dtype,
            return_bias=False,
        )
        for part, weight in enumerate(weights):
            biases = [] if bias is None else [("bias", bias)]
            for key, tensor in [*weight.tensors(), *biases]:
                parameter = getattr(layer, key)
                shard = (part,) if len(weights) > 1 else ()
                parameter.weight_loader(parameter, tensor, *shard)
        layer.quant_method.process_weights_after_loading(layer)
    if rank and isinstance(layer, RowParallelLinear):
        layer.register_parameter("bias", None)  # only the first rank adds it
    return VllmMatmul(layer)


@no_cuda
@pytest.mark.parametrize("scheme", SCHEMES)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    ranks=st.sampled_from([2, 3, 4]),
    groups=st.integers(1, 3),
    rows=st.sampled_from([32, 96, 288]),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=examples(4))
def test_products_are_those_of_vllms_layers_on_each_rank(
    scheme: str,
    dtype: torch.dtype,
    ranks: int,
    groups: int,
    rows: int,
    tokens: int,
    seed: int,
):
    """Contract: a row-parallel product has the bits of the sum of vLLM's own layers of each rank,
    and a column-parallel one, which is multiplied whole, those of the ranks' side by side.

    Blind spot: the all-reduce itself, which tests/engine/test_ranks_engine.py runs.
    """
    factory = VllmFactory(dtype)
    columns = ranks * groups * 128
    weights = [
        materialize(heavy(ranks * rows, columns, seed=seed + n) * 0.05, get_scheme(scheme), dtype)
        for n in range(2)
    ]
    bias = normal(ranks * rows, seed=seed).to(dtype)
    row_bias = None if scheme == "w4a8" else bias  # its kernel would add it on every rank
    x = heavy(tokens, columns, seed=seed + 5).to(dtype)

    def row(**named: Any) -> RowParallelLinear:
        return RowParallelLinear(columns, ranks * rows, bias=row_bias is not None, **named)

    def column(**named: Any) -> MergedColumnParallelLinear:
        return MergedColumnParallelLinear(columns, [ranks * rows] * 2, bias=True, **named)

    parts = x.split(columns // ranks, dim=-1)
    products = [
        rank_layer(factory, weights[:1], row_bias, rank, ranks, row)(parts[rank].contiguous())
        for rank in range(ranks)
    ]
    assert torch.equal(
        row_parallel(factory, ranks, "layer", weights[:1], [row_bias])(x), sum_of_ranks(products)
    )
    halves = [
        rank_layer(factory, weights, bias, rank, ranks, column)(x).chunk(2, dim=-1)
        for rank in range(ranks)
    ]
    side_by_side = torch.cat([half[part] for part in range(2) for half in halves], dim=-1)
    assert torch.equal(factory.linear("layer", weights, [bias, bias])(x), side_by_side)


def test_a_sum_of_ranks_is_rounded_once():
    """1 + 2⁻⁸ + 2⁻⁸ is 1 + 2⁻⁷ in bfloat16, and 1 if each sum is rounded (to even)."""
    small = torch.full((1,), 2.0**-8, dtype=BF16)
    total = sum_of_ranks([torch.ones(1, dtype=BF16), small, small])
    assert total.dtype == BF16
    assert total.item() == 1 + 2.0**-7


@no_cuda
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_ranks_of_an_engine_add_up_from_the_first_to_the_last(dtype: torch.dtype, ranks: int):
    """Contract: the last of two and of three ranks has the learner's sum in the place of its own
    part. Integers are left to vLLM.

    Blind spot: vLLM's gather, which tests/engine/test_ranks_engine.py runs.
    """
    VllmFactory(dtype)  # registers the plugin
    parts = [(heavy(64, 96, seed=n) * 3).to(dtype) for n in range(ranks)]
    total = sum_of_ranks(parts)
    by_vllm: list[torch.Tensor] = []
    group: Any = SimpleNamespace(
        world_size=ranks,
        device_group=None,
        all_gather=lambda part, dim: torch.cat([*(p[None] for p in parts[:-1]), part], dim),
        dist_module=SimpleNamespace(all_reduce=lambda part, group: by_vllm.append(part)),
    )
    own = parts[-1].clone()
    assert CpuCommunicator.all_reduce(group, own) is own
    assert torch.equal(own, total)
    CpuCommunicator.all_reduce(group, own.view(torch.int8))
    assert len(by_vllm) == 1


@no_cuda
@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16-g64"])
@pytest.mark.parametrize("columns", [576, 1536])
def test_a_real_models_layers_are_those_of_three_ranks(scheme: str, columns: int):
    """Contract: `o_proj` and `down_proj` of SmolLM2-135M, of which a rank has 192 and 512 columns,
    have the bits of vLLM's own layers of three ranks, for a token alone and for many.
    """
    factory = VllmFactory(BF16)
    weight = materialize(heavy(576, columns, seed=1) * 0.05, get_scheme(scheme), BF16)
    x = heavy(33, columns, seed=2).to(BF16)

    def row(**named: Any) -> RowParallelLinear:
        return RowParallelLinear(columns, 576, bias=False, **named)

    layers = [rank_layer(factory, [weight], None, rank, 3, row) for rank in range(3)]
    whole = row_parallel(factory, 3, "layer", [weight], [None])(x)
    for rows in (x, x[:1]):
        parts = rows.split(columns // 3, dim=-1)
        products = [layer(part.contiguous()) for layer, part in zip(layers, parts, strict=True)]
        assert torch.equal(sum_of_ranks(products), whole[: len(rows)])


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "fp8", "w4a16"])
def test_the_backward_multiplies_each_ranks_own_activation_codes(scheme: str):
    """Contract: with x̂ of each half of the columns by the half's own scale, dW = dyᵀ · x̂ and
    dx = dy · Ŵ, whatever the ranks.
    """
    context = LayerContext(torch.float32, "reference", ranks=2)
    master = nn.Parameter(heavy(64, 256, seed=1) * 0.05)
    linear = LowBitLinear("layer", master, None, get_scheme(scheme), context)
    linear.divide_columns()
    linear.refresh()
    x = heavy(9, 256, seed=2)
    x[:, 128:] *= 50
    dy = normal(9, 64, seed=3)
    halves = [
        half
        if linear.scheme.activations is None
        else multiplied_activation(half, linear.scheme).dequantized(torch.float32)
        for half in x.split(128, dim=-1)
    ]
    used = torch.cat(halves, dim=-1)
    weight = linear.codes().dequantized()
    dx, dw = layer_gradients(linear, x, dy)
    torch.testing.assert_close(dw.double(), dy.double().t() @ used.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear(x), used @ weight.t(), rtol=1e-4, atol=1e-4)
    with context.one_rank():
        assert linear.ranks == 1


@pytest.mark.parametrize(
    ("scheme", "ranks", "reason"),
    [
        ("w4a16", 2, r"o_proj' in 'w4a16' would have on each rank 64 input columns.*: 1$"),
        ("w8a8", 3, r"4 attention heads; sizes that do: 1, 2, 4$"),
        ("w4a16-g32", 8, r"4 attention heads; sizes that do: 1, 2, 4$"),
    ],
)
def test_ranks_that_cannot_divide_a_model_are_refused_with_those_that_can(
    random_policy: Policies, scheme: str, ranks: int, reason: str
):
    with pytest.raises(ConfigError, match=reason):
        make_model(random_policy(True), scheme, ranks=ranks)


@pytest.mark.parametrize("order", [("w1", "w3", "w2"), ("w2", "w1", "w3")])
def test_experts_are_divided_by_the_familys_down_projection(order: tuple[str, ...]):
    """Contract: whatever order a checkpoint names an expert's matrices in. 96 columns are between
    them, which 64 ranks cannot divide, though each rank could have one of the other 64.
    """
    shapes = {f"experts.0.{leaf}": (64, 96) if leaf == "w2" else (96, 64) for leaf in order}
    plan: Any = SimpleNamespace(schemes={name: SimpleNamespace(name="bf16") for name in shapes})
    engine: Any = SimpleNamespace(experts={"runner": "experts"})
    down = family_of("mixtral").experts.down
    misfits = _experts_misfits(64, engine, down, plan, shapes, BF16)
    assert [*misfits] == ["experts 'experts' have 96 columns between their matrices"]


@no_cuda
@given(
    scheme=st.sampled_from(["bf16", "w4a16-channel", "w4a16-g32", "w4a8", "w8a8", "fp8"]),
    rows=st.integers(1, 20).map(lambda count: 8 * count),
    columns=st.integers(1, 6).map(lambda count: 32 * count),
)
@settings(max_examples=examples(40))
def test_shapes_that_vllm_has_no_kernel_for_are_named(scheme: str, rows: int, columns: int):
    """Contract: the answer, for which nothing is allocated, is that of a layer that is built."""
    assume(not SCHEME_SPECS[scheme].misfit((rows, columns)))
    weight = materialize(heavy(rows, columns, seed=1), get_scheme(scheme), BF16)
    refusal = shape_refusal(scheme, BF16, (rows, columns))
    with pytest.raises(ValueError, match="kernel") if refusal else nullcontext():
        VllmFactory(BF16).linear("layer", [weight], [None])


@no_cuda
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_w4a8_alone_packs_a_layers_bias(dtype: torch.dtype):
    assert [name for name in SCHEMES if packs_bias(name, dtype)] == ["w4a8"]


@no_cuda
def test_a_scheme_of_ones_own_whose_kernel_packs_a_bias_is_refused(
    random_policy: Policies, monkeypatch: pytest.MonkeyPatch
):
    """Contract: a scheme like w4a8 with another name and smaller groups is refused for more than
    one rank if a row-parallel layer has a bias, which each rank's kernel would add.
    """
    spec = dataclasses.replace(
        SCHEME_SPECS["w4a8"], name="own", weights=Codes("int", 4, columns=32)
    )
    monkeypatch.setitem(SCHEME_SPECS, "own", spec)
    monkeypatch.setitem(schemes.SCHEMES, "own", schemes._scheme(spec))
    model = make_model(random_policy(True), "own", ranks=2)
    assert model._layers.engine is not None
    biased = {"model.layers.0.self_attn.o_proj"}
    engine = dataclasses.replace(model._layers.engine, biased=biased)
    model._layers = dataclasses.replace(model._layers, engine=engine)
    reason = r"o_proj' has a bias, which 'own' would add on each rank; sizes that do: 1$"
    with pytest.raises(ConfigError, match=reason):
        model.divide_among(2)


@no_cuda
@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16-g32"])
def test_experts_are_those_of_vllms_experts_on_each_rank(
    scheme: str, monkeypatch: pytest.MonkeyPatch
):
    """Contract: experts have the bits of the sum of vLLM's own, built and loaded for each rank."""
    factory = VllmFactory(BF16)
    gate_up, down = heavy(5, 512, 128, seed=1, rows=False), heavy(5, 128, 256, seed=2, rows=False)
    weights = materialize_experts(gate_up * 0.06, down * 0.04, get_scheme(scheme), BF16, EXPERTS)
    x = heavy(17, 128, seed=3).to(BF16)
    picked, index = routed(17)
    alone = FusedMoEParallelConfig.make_no_parallel()
    outputs = []
    for rank in range(2):
        own = dataclasses.replace(alone, tp_size=2, tp_rank=rank)
        monkeypatch.setattr(FusedMoEParallelConfig, "make_no_parallel", lambda own=own: own)
        with of_rank(rank, 2):
            outputs.append(factory.experts(EXPERTS, SHAPE, weights)(x, picked, index))
    monkeypatch.setattr(FusedMoEParallelConfig, "make_no_parallel", lambda: alone)
    ours = experts_of_ranks(factory, 2, EXPERTS, SHAPE, weights)
    assert torch.equal(ours(x, picked, index), sum_of_ranks(outputs))
