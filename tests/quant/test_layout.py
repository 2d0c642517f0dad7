"""Tests of checkpoint names, including fused experts, and of the names that a model streams."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AriaTextConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    Qwen3NextConfig,
)
from transformers.distributed.sharding_utils import DtensorShardOperation

from qarl.cli.schemes import checkpoint_bytes
from qarl.quant.checkpoint.families import Family, family_of
from qarl.quant.checkpoint.load import ModelError, load_masters, model_skeleton
from qarl.quant.checkpoint.shapes import plan_layers, weight_shapes
from qarl.quant.materialize import materialize
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import mesh_of_all, own_rows
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, SchemeError, get_scheme
from tests.support.engines import make_model
from tests.support.models import low_bit, qwen3
from tests.support.moe_models import CONFIGS, SIZES, random_moe
from tests.support.one_of_several import one_of_several

kinds = pytest.mark.parametrize("kind", CONFIGS)
DENSE = ("tied", "untied")


def written(kind: str, folder: Path) -> Path:
    """Write a checkpoint as transformers writes it, of a mixture of experts of this kind or of a
    dense model with this kind of output head.
    """
    model = random_moe(CONFIGS[kind]) if kind in CONFIGS else qwen3(tied=kind == "tied")
    model.save_pretrained(folder)
    return folder


def streamed(model: LowBitModel) -> dict[str, torch.Tensor]:
    items = list(model.low_bit_tensors())
    found = {item.name: item.tensor for item in items}
    assert len(found) == len(items), "a name was sent twice"
    return found


def test_layouts_and_renamings_are_transformers_own():
    """Contract: renamings equal transformers' for names that none of its models covers; whole
    checkpoints are compared below.
    """
    router = family_of("phimoe").checkpoint_name("model.layers.0.mlp.router.weight")
    assert router == "model.layers.0.block_sparse_moe.gate.weight"
    assert (
        family_of("mixtral").checkpoint_name("model.layers.0.mlp")
        == "model.layers.0.block_sparse_moe"
    )
    assert family_of("nobody") == family_of("llama") == Family()


@pytest.mark.parametrize("kind", [*DENSE, *CONFIGS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_unquantized_stream_is_what_save_pretrained_writes(
    kind: str, dtype: str, tmp_path: Path
):
    """Contract: the stream has the same names, none missing and none extra, and the same shapes.

    Parameters are rounded once to the compute dtype, and persistent buffers (a router's correction
    bias) are unchanged. The oracle is transformers' own reader and writer.
    """
    theirs = load_file(written(kind, tmp_path) / "model.safetensors")
    model = make_model(tmp_path, "bf16", dtype, kernel="reference")
    ours = streamed(model)
    buffers = {name for name, _ in model.module.named_buffers()}
    assert ours.keys() == theirs.keys()
    # so that some buffers are compared
    biased = kind in ("deepseek_v3", "glm4_moe", "dots1")
    assert biased == bool(buffers & theirs.keys())
    for name, tensor in theirs.items():
        expected = tensor if name in buffers else tensor.to(COMPUTE_DTYPES[dtype])
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize(
    ("kind", "scheme", "layers"),
    [
        *((kind, scheme, "[]") for kind in (*DENSE, "qwen3_moe") for scheme in SCHEMES),
        *(
            (kind, scheme, "[]")
            for kind in CONFIGS
            if kind != "qwen3_moe"
            for scheme in ("w4a16-g32", "w8a8", "nvfp4")
        ),
        ("tied", "w4a16", "first:1=bf16,*.down_proj=w8a8"),
    ],
)
def test_a_quantized_stream_has_the_names_with_suffixes(
    kind: str, scheme: str, layers: str, tmp_path: Path
):
    """Contract: every matrix that the plan quantizes has the tensors of `materialize` of that
    matrix by itself, a tied head has none, and nothing else changes. `qarl schemes` counts the same
    number of bytes.
    """
    plain = load_file(written(kind, tmp_path) / "model.safetensors")
    model = make_model(tmp_path, scheme, layers=layers, kernel="reference")
    # Granite's: [E, 2I, H] and [E, H, I]
    for name in [name for name, tensor in plain.items() if tensor.ndim == 3]:
        stack = plain.pop(name)
        layer = name.rsplit(".", 2)[0] + ".experts"
        keys = ("gate_proj", "up_proj") if "input" in name else ("down_proj",)
        parts = list(zip(keys, stack.chunk(len(keys), 1), strict=True))
        plain |= {
            f"{layer}.{e}.{key}.weight": part[e] for key, part in parts for e in range(len(stack))
        }
    ours = streamed(model)
    shapes = weight_shapes(model_skeleton(tmp_path))
    _, counted = checkpoint_bytes(
        get_scheme(scheme), model_skeleton(tmp_path), torch.bfloat16.itemsize
    )
    # routers' biases, which it does not count
    buffers = {name for name, _ in model.module.named_buffers()}
    assert layers != "[]" or counted == sum(
        tensor.nbytes for name, tensor in ours.items() if name not in buffers
    )
    experts = [layer for layer in shapes if ".experts." in layer]
    assert (len(experts) > 8) == (kind in CONFIGS)
    assert scheme == "bf16" or not set(experts) & set(model.plan.ignored)
    for layer, shape in shapes.items():
        weight = plain.pop(f"{layer}.weight", None)
        if weight is None:  # a tied head
            assert layer == "lm_head"
            continue
        assert weight.shape == shape
        found = model.plan.schemes[layer]
        for suffix, tensor in materialize(weight, found, torch.bfloat16, layer).tensors():
            given = ours.pop(f"{layer}.{suffix}")
            assert (given.dtype, given.shape) == (tensor.dtype, tensor.shape), f"{layer}.{suffix}"
            # else over gate and up together, see tests/quant/test_experts.py
            if not found.fuses_scales:
                assert torch.equal(given.view(torch.uint8), tensor.view(torch.uint8)), (
                    f"{layer}.{suffix}"
                )
    assert ours.keys() == plain.keys()
    assert all(
        torch.equal(t, plain[name] if name in buffers else plain[name].bfloat16())
        for name, t in ours.items()
    )
    reported = {row.name: row.scheme for row in model.layer_reports()}
    assert kind in CONFIGS or reported == {
        name: scheme.name for name, scheme in model.plan.schemes.items()
    }


@kinds
def test_routers_and_shared_expert_gates_stay_in_the_compute_dtype(kind: str, tmp_path: Path):
    random_moe(CONFIGS[kind]).save_pretrained(tmp_path)
    plan = plan_layers(model_skeleton(tmp_path), get_scheme("w8a8"))
    router = {
        "mixtral": "block_sparse_moe.gate",
        "granitemoe": "block_sparse_moe.router.layer",
    }.get(kind, "mlp.gate")
    expected = {f"model.layers.1.{router}", "lm_head"}
    expected |= {f"model.layers.0.{router}"} if kind in ("mixtral", "granitemoe") else set()
    expected |= {"model.layers.0.mlp.gate"} if kind == "olmoe" else set()
    expected |= {"model.layers.1.mlp.shared_expert_gate"} if kind == "qwen2_moe" else set()
    assert set(plan.ignored) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            Llama4TextConfig(**SIZES, num_local_experts=4, intermediate_size_mlp=128),
            r"'llama4_text'.*router weighs.*; known are mixtures of",
        ),
        (
            AriaTextConfig(**SIZES, moe_num_experts=4, moe_topk=2),
            r"'aria_text'.*, which are transposed, \[E, H, 2I\] and \[E, I, H\]; known are",
        ),
        (
            LongcatFlashConfig(
                **SIZES, n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=64
            ),
            r"'longcat_flash'.*, of which 2 return their input and have no down_proj",
        ),
    ],
    ids=["llama4", "aria", "longcat"],
)
def test_unknown_layouts_are_refused_from_the_skeleton(config: Any, words: str, tmp_path: Path):
    config.save_pretrained(tmp_path)
    with pytest.raises(SchemeError, match=words):
        model_skeleton(tmp_path)


def drawn_modules(seed: int) -> dict[str, nn.Module]:
    """Return modules that are neither linear layers nor experts, of drawn kinds and sizes.

    One has a 3-D weight whose first axis has as many rows as a mixture here has experts.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    channels, columns, width = draw(2, 9), draw(2, 9), draw(1, 5)
    return {
        "depthwise": nn.Conv1d(channels, channels, width, groups=channels, bias=bool(draw(0, 2))),
        "conv1d": nn.Conv1d(columns, 3, width, bias=bool(draw(0, 2))),
        "conv2d": nn.Conv2d(columns, channels, width),
        "norm": nn.LayerNorm(channels),
        "bilinear": nn.ParameterDict({"table": torch.zeros(draw(1, 5), columns)}),
    }


@pytest.mark.parametrize("kind", ["untied", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8"])
@pytest.mark.parametrize("seed", range(3))
def test_modules_that_are_neither_linear_nor_experts_stay_in_the_compute_dtype(
    kind: str, scheme: str, seed: int, tmp_path: Path
):
    """Contract: they change neither the plan nor the other tensors, and are streamed under their
    own names, their parameters rounded once. Blind spot: no forward passes through them.
    """
    model = random_moe(CONFIGS[kind]) if kind in CONFIGS else qwen3(tied=False)
    expected = plan_layers(model, get_scheme(scheme))
    drawn = drawn_modules(seed)
    if kind not in CONFIGS:  # no experts, so nothing here is a stack of them
        drawn["stack"] = nn.ParameterDict({"weight": torch.zeros(3, 4, 5)})
    layer: Any = model.base_model.get_submodule("layers.0")
    for name, module in drawn.items():
        layer.register_module(name, module)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    assert plan_layers(model, get_scheme(scheme)) == expected
    rounded = {
        f"model.layers.0.{name}.{key}": parameter.bfloat16()
        for name, module in drawn.items()
        for key, parameter in module.named_parameters()
    }
    assert len(rounded) >= 7
    ours = streamed(low_bit(model, scheme, operators="transformers"))
    for name, parameter in rounded.items():
        assert torch.equal(ours[name], parameter), name


@pytest.mark.parametrize("experts", [0, 4])
def test_gated_delta_nets_are_planned_without_their_convolutions(experts: int, tmp_path: Path):
    config = Qwen3NextConfig(**SIZES, num_experts=experts, num_experts_per_tok=2, head_dim=64)
    config.save_pretrained(tmp_path)
    layers = plan_layers(model_skeleton(tmp_path), get_scheme("w8a8")).schemes
    assert any(name.endswith("in_proj_qkvz") for name in layers)
    assert any(".experts.3." in name for name in layers) == bool(experts)
    assert not any("conv1d" in name for name in layers)


def spoiled(tmp_path: Path, kind: str, drop: str, shards: bool = False) -> Path:
    """Write a checkpoint without the tensors whose name contains `drop`."""
    random_moe(CONFIGS[kind]).save_pretrained(tmp_path, max_shard_size="300KB" if shards else "1GB")
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file(
            {n: t for n, t in tensors.items() if drop not in n},
            file,
            metadata={"format": "pt"},
        )
    return tmp_path


@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "shards"])
@pytest.mark.parametrize(
    ("kind", "drop", "first", "more"),
    [
        pytest.param(
            "qwen3_moe",
            "layers.1.mlp.experts.3.up_proj",
            "model.layers.1.mlp.experts.3.up_proj.weight",
            "",
            id="one tensor of an expert",
        ),
        pytest.param(
            "qwen3_moe",
            "layers.1.mlp.experts.4.",
            "model.layers.1.mlp.experts.4.gate_proj.weight",
            r" \(and 2 more\)",
            id="a whole expert",
        ),
        pytest.param(
            "mixtral",
            "layers.0.block_sparse_moe.experts.0.w2",
            "layers.0.block_sparse_moe.experts.0.w2.weight",
            "",
            id="mixtral",
        ),
        pytest.param(
            "deepseek_v3",
            "layers.1.mlp.experts.1.down",
            "model.layers.1.mlp.experts.1.down_proj.weight",
            "",
            id="deepseek_v3",
        ),
    ],
)
def test_missing_experts_are_named(
    kind: str, drop: str, first: str, more: str, shards: bool, tmp_path: Path
):
    folder = spoiled(tmp_path, kind, drop, shards)
    for read in (model_skeleton, lambda path: load_masters(path, torch.float32)):
        with pytest.raises(
            ModelError,
            match=(
                rf"other experts than .*: '[\w.]*{first}' is missing instead of [^(]*{more};"
                r" copy it"
            ),
        ):
            read(folder)


def test_a_layer_without_any_expert_is_refused(tmp_path: Path):
    folder = spoiled(tmp_path, "qwen3_moe", "layers.1.mlp.experts.")
    with pytest.raises(
        ModelError,
        match=r"lacks 2 tensors, the first being 'model\.layers\.1\.mlp\.experts\.down",
    ):
        load_masters(folder, torch.float32)


def test_experts_whose_number_or_size_contradicts_the_config_are_refused(tmp_path: Path):
    random_moe(CONFIGS["qwen3_moe"]).save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        written.replace('"num_local_experts": 5', '"num_local_experts": 4')
    )
    with pytest.raises(ModelError, match=r"experts\.4\.down_proj\.weight' is .* instead of none"):
        model_skeleton(tmp_path)
    (tmp_path / "config.json").write_text(
        written.replace('_intermediate_size": 128', '_intermediate_size": 64')
    )
    with pytest.raises(
        ModelError, match=r"gate_proj\.weight' is \[128, 128\] instead of \[64, 128\]"
    ):
        model_skeleton(tmp_path)


def test_fused_checkpoints_are_left_to_the_loader(tmp_path: Path):
    """Contract: transformers can also write its own fused names and reads them back, so nothing
    counts as missing.
    """
    model = random_moe(CONFIGS["qwen3_moe"])
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    loaded = load_masters(tmp_path, torch.float32).state_dict()
    expected = model.state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_expert_sizes_that_no_group_divides_are_refused_naming_the_layer(tmp_path: Path):
    config = type(CONFIGS["qwen3_moe"])(
        **{**CONFIGS["qwen3_moe"].to_dict(), "moe_intermediate_size": 96}
    )
    config.save_pretrained(tmp_path)
    said = (
        r"'w4a16': layer 'model\.layers\.1\.mlp\.experts\.0\.down_proj' has 96 input columns, no"
        r" multiple of .* 128"
    )
    with pytest.raises(SchemeError, match=rf"{said}.*\(and 4 more layers\)"):
        plan_layers(model_skeleton(tmp_path), get_scheme("w4a16"))
    plan_layers(model_skeleton(tmp_path), get_scheme("w8a8"))


@pytest.mark.parametrize("kind", [*CONFIGS, "tied"])
def test_a_process_reads_its_rows_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contract: the rows of three processes, concatenated, are the model in its dtype.

    No tensor that transformers reads has more than a process's rows of its parameter, or is an
    expert of another process. Blind spot: the processes are one after another, over a backend that
    sends nothing; `test_two_processes.py` has real ones.
    """
    model = qwen3() if kind == "tied" else random_moe(CONFIGS[kind])
    model.save_pretrained(tmp_path)
    whole = load_masters(tmp_path, torch.bfloat16)
    elements = [0]
    shard_tensor = DtensorShardOperation.shard_tensor

    def counted(*args: Any, **named: Any) -> torch.Tensor | None:
        tensor = shard_tensor(*args, **named)
        elements[0] += 0 if tensor is None else tensor.numel()
        return tensor

    monkeypatch.setattr(DtensorShardOperation, "shard_tensor", counted)
    parts = [rows_read_by(tmp_path, rank, 3) for rank in range(3)]
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([own_rows(part[name].detach()) for part in parts]), parameter)
        assert all(part[name].shape == parameter.shape for part in parts)
    # of four experts the third process has none, and transformers reads such a stack whole
    sliced = [p for p in whole.parameters() if p.ndim < 3 or len(p) != 4]
    assert elements[0] == sum(parameter.numel() for parameter in sliced)


def rows_read_by(
    folder: Path,
    rank: int,
    world: int,
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that one of several processes reads."""
    with one_of_several(rank, world):
        mesh = mesh_of_all(torch.device("cpu"))
        return dict(load_masters(folder, torch.bfloat16, mesh=mesh).named_parameters())
