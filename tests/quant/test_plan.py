"""Tests of schemes per layer: how rules resolve, and that engine and compressed-tensors read the
same plan from config.json.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.configs.errors import ConfigError
from qarl.configs.load import load_config
from qarl.configs.schema.run import LayerRule
from qarl.quant.checkpoint.plan import LayerPlan, make_plan
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.schemes import SchemeError, get_scheme, scheme_of_args
from tests.support.cases import pattern
from tests.support.models import SIZES
from tests.support.profiles import examples

LAYERS = 3
EXPERTS = 2
ATTENTION = [f"self_attn.{p}_proj" for p in "qkvo"]
MLP = [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
DENSE = [f"model.layers.{i}.{part}" for i in range(LAYERS) for part in (*ATTENTION, *MLP)] + [
    "lm_head"
]
MOE = [
    f"model.layers.{i}.{part}"
    for i in range(LAYERS)
    for part in (
        *ATTENTION,
        "mlp.gate",
        *(f"mlp.experts.{e}.{p[4:]}" for e in range(EXPERTS) for p in MLP),
    )
] + ["lm_head"]
FIXED = {"model.embed_tokens": "it is looked up"}
SCHEMES = ["bf16", "w4a16", "w8a8", "fp8"]


def rules(text: str) -> Sequence[LayerRule]:
    return load_config(None, {"layers": text}).layers


def shaped(layers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return layers with a shape that each scheme takes."""
    return dict.fromkeys(layers, (128, 128))


def plan_of(text: str, main: str = "w4a16", layers: Sequence[str] = DENSE) -> LayerPlan:
    return make_plan(get_scheme(main), rules(text), shaped(layers), FIXED)


def of(plan: LayerPlan, pattern: str) -> set[str]:
    """Return the names of the schemes of the layers that match a shell pattern."""
    return {scheme.name for layer, scheme in plan.schemes.items() if fnmatchcase(layer, pattern)}


def test_a_head_is_quantized_if_a_rule_names_it():
    assert of(plan_of("lm_head=w8a8"), "lm_head") == {"w8a8"}
    alike = plan_of("lm_head=w8a8", main="w8a8").quantization_config()
    assert alike is not None
    assert alike["config_groups"]["group_0"]["targets"] == [
        "Linear",
        "lm_head",
    ]
    assert of(plan_of("model.layers.0.mlp.gate=w8a8", layers=MOE), "*.0.mlp.gate") == {"w8a8"}
    assert of(plan_of("lm_head=bf16"), "lm_head") == {"bf16"}


def test_rules_for_counted_decoder_layers_skip_their_router():
    plan = plan_of("first:2=w8a8", layers=MOE)
    assert of(plan, "model.layers.[01].mlp.gate") == {"bf16"}
    assert (
        of(plan, "model.layers.[01].mlp.experts.*")
        == of(plan, "model.layers.[01].self_attn.*")
        == {"w8a8"}
    )


COUNTED = {
    "first:1": ("model.layers.0.",),
    "last:2": ("model.layers.1.", "model.layers.2."),
    "first:3": ("model",),
}
PATTERNS = [
    *COUNTED,
    "*.down_proj",
    "*.o_proj",
    "*.self_attn.*",
    "re:.*mlp",
    "model.layers.1.*",
]


@given(
    chosen=st.lists(
        st.tuples(
            st.sampled_from(PATTERNS),
            st.sampled_from(SCHEMES),
        ),
        max_size=5,
    ),
    main=st.sampled_from(SCHEMES),
)
def test_rules_resolve_as_a_plain_loop_would(chosen: list[tuple[str, str]], main: str):
    """Contract: patterns that split no fused module make the plan of a plain loop, unless a rule or
    the main scheme is idle.
    """

    def hits(pattern: str, layer: str) -> bool:
        if pattern in COUNTED:
            return layer.startswith(COUNTED[pattern])
        return (
            bool(re.match(pattern[3:], layer))
            if pattern[:3] == "re:"
            else fnmatchcase(layer, pattern)
        )

    expected = {layer: "bf16" if layer == "lm_head" else main for layer in DENSE}
    # the first that hits
    expected |= {layer: s for p, s in reversed(chosen) for layer in DENSE if hits(p, layer)}
    shadowed = any(
        all(
            any(hits(earlier, layer) for earlier, _ in chosen[:i])
            for layer in DENSE
            if hits(p, layer)
        )
        for i, (p, _) in enumerate(chosen)
    )
    listed = [LayerRule(match=p, scheme=s) for p, s in chosen]
    if shadowed or (main not in expected.values() and main != "bf16"):
        with pytest.raises(SchemeError, match="changes nothing" if shadowed else "quantizes none"):
            make_plan(get_scheme(main), listed, shaped(DENSE), FIXED)
    else:
        plan = make_plan(get_scheme(main), listed, shaped(DENSE), FIXED)
        assert {layer: scheme.name for layer, scheme in plan.schemes.items()} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "*.donw_proj=w8a8",
            "'*.donw_proj=w8a8' matches no layer of the model; near it are '*.down_proj'",
            id="misspelled layer",
        ),
        pytest.param(
            "model.layers.0.self_attn=w8a8",
            "matches no layer of the model; near it are 'model.layers.0.self_attn.",
            id="layer instead of its matrices",
        ),
        pytest.param(
            "re:quux=w8a8",
            "matches no layer … its layers end in q_proj, … 'model.layers.0.self_attn.q_proj'",
            id="regular expression without a match",
        ),
        pytest.param(
            "first:4=bf16",
            "'first:4=bf16' matches no layer of the model; it has 3 decoder layers",
            id="more decoder layers than there are",
        ),
        pytest.param(
            "*.down_proj=w8",
            "layer rule '*.down_proj=w8': unknown scheme 'w8': known are …did you mean 'w8a8'",
            id="unknown scheme",
        ),
        pytest.param(
            "first:1=bf16,model.layers.0.*=w8a8",
            "'model.layers.0.*=w8a8' changes nothing: … 'first:1=bf16' comes",
            id="idle rule",
        ),
        pytest.param(
            "*.q_proj=w8a8",
            (
                "'model.layers.0.self_attn.qkv_proj' as one, so its 3 layers need one scheme, "
                "but …q_proj' takes 'w8a8' by rule '*.q_proj=w8a8', …k_proj' takes 'w4a16' by "
                "no rule; match all"
            ),
            id="stack split by a pattern",
        ),
        pytest.param(
            "*.1.mlp.up_proj=bf16",
            r"gate_up_proj' as one, …for example re:.*\.(gate_proj|up_proj)$)",
            id="stack split by a layer",
        ),
        pytest.param(
            "*=w8a8",
            (
                "'*=w8a8' would quantize 'lm_head'; … names them exactly ('lm_head=w8a8'); put "
                "a rule before"
            ),
            id="head by a wildcard",
        ),
        pytest.param(
            "re:.*(_proj|head)$=w8a8", "would quantize 'lm_head'", id="head by a regular expression"
        ),
        pytest.param(
            "*embed*=w8a8",
            "would quantize 'model.embed_tokens', which cannot be: it is looked up",
            id="embedding by a wildcard",
        ),
        pytest.param(
            "model.embed_tokens=w8a8",
            "would quantize 'model.embed_tokens', which cannot be: it is looked up",
            id="embedding by name",
        ),
        pytest.param(
            "model.*=w8a8", "would quantize 'model.embed_tokens'", id="embedding by a prefix"
        ),
        pytest.param(
            "*.layers.*=w8a8",
            (
                "scheme 'w4a16' quantizes none of the model's 22 linear layers; the rules take "
                "them all"
            ),
            id="nothing left for the main scheme",
        ),
        pytest.param(
            "*=bf16", "quantizes none of the model's 22 linear layers", id="nothing quantized"
        ),
        pytest.param(
            "first:1",
            "layers.0: 'first:1' is not a layer rule; write PATTERN=SCHEME",
            id="no scheme",
        ),
        pytest.param("=w8a8", "layer rule '=w8a8' needs a pattern and a scheme", id="no pattern"),
        pytest.param(
            "first:0=bf16", "counts decoder layers with '0'; write first:1", id="count of zero"
        ),
        pytest.param("last:x=bf16", "counts decoder layers with 'x'", id="count is not a number"),
        pytest.param(
            "re:(=bf16",
            "'re:(=bf16' is not a regular expression: missing )",
            id="broken regular expression",
        ),
        pytest.param(
            "[{match: a, schema: b}]",
            "layers: {'match': 'a', …} lacks 'scheme'; …layers.0.schema 'b' is not a key",
            id="wrong key",
        ),
    ],
)
def test_a_rule_that_cannot_be_meant_or_read_is_refused(text: str, message: str):
    with pytest.raises((SchemeError, ConfigError), match=pattern(message)):
        plan_of(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "model.layers.0.*=w8a8",
            "would quantize 'model.layers.0.mlp.gate'; … routers",
            id="router",
        ),
        pytest.param(
            "*.down_proj=w8a8",
            "'model.layers.0.mlp.experts' as one, so its 6 layers need one scheme",
            id="experts split by matrix",
        ),
        pytest.param(
            "*.experts.1.*=bf16",
            "'model.layers.0.mlp.experts' as one",
            id="experts split by number",
        ),
    ],
)
def test_rules_that_quantize_routers_or_split_experts_are_refused(text: str, message: str):
    with pytest.raises(SchemeError, match=pattern(message)):
        plan_of(text, layers=MOE)
    spared = plan_of("*.mlp.gate=bf16,model.layers.0.*=w8a8", layers=MOE)
    assert of(spared, "model.layers.0.mlp.gate") == {"bf16"}
    assert of(spared, "model.layers.0.mlp.exp*") == {"w8a8"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(r"first:1=bf16, re:.*\.(gate|up){1,2}_proj$=w8a8", id="text"),
        pytest.param(
            (
                r"[{match: 'first:1', scheme: bf16}, {match: 're:.*\.(gate|up){1,2}_proj$', "
                "scheme: w8a8}]"
            ),
            id="mappings",
        ),
        pytest.param(r"['first:1=bf16', 're:.*\.(gate|up){1,2}_proj$=w8a8']", id="texts"),
    ],
)
def test_rules_parse_the_same_from_text_lists_and_mappings(tmp_path, text: str):
    pattern = r"re:.*\.(gate|up){1,2}_proj$"
    expected = (
        LayerRule(match="first:1", scheme="bf16"),
        LayerRule(match=pattern, scheme="w8a8"),
    )
    assert rules(text) == expected
    quoted = text if text.startswith("[") else f'"{text.replace(chr(92), chr(92) * 2)}"'
    (tmp_path / "c.yaml").write_text(f"layers: {quoted}\n")
    assert load_config(tmp_path / "c.yaml", {}).layers == expected


FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
MODULES = {
    name: type(name, (nn.Module,), {})()
    for name in ("QKVParallelLinear", "RowParallelLinear", "RoutedExperts")
}


def engine_modules(layers: Sequence[str]) -> dict[str, list[str]]:
    """Return vLLM module name → the checkpoint layers that it is made of."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        parent, _, leaf = layer.rpartition(".")
        fused = next((key for key, parts in FUSED.items() if leaf in parts), leaf)
        name = layer if ".experts." in layer else f"{parent}.{fused}" if parent else layer
        found.setdefault(name, []).append(layer)
    return found


def vllm_reads(config: dict[str, Any], name: str) -> str:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    parsed = CompressedTensorsConfig.from_config(config)
    parsed.packed_modules_mapping = FUSED
    parsed._add_fused_moe_to_target_scheme_map()
    kind = (
        "RoutedExperts"
        if ".experts." in name
        else "QKVParallelLinear"
        if "qkv" in name
        else "RowParallelLinear"
    )
    found = parsed.get_scheme_dict(MODULES[kind], name)
    if found is None:
        return "bf16"
    scheme = scheme_of_args(found["weights"], found["input_activations"])  # type: ignore[arg-type]
    assert scheme is not None
    assert scheme.format is not None
    assert found["format"] == scheme.format.value
    return scheme.name


@st.composite
def plans(draw: st.DrawFn, layers: Sequence[str]) -> LayerPlan:
    """Draw a plan that gives every module the engine knows its own scheme, the same for all experts
    of a layer.
    """
    main = draw(st.sampled_from(SCHEMES))
    listed = []
    experts = {}
    for parts in engine_modules(layers).values():
        scheme = draw(st.sampled_from([main, *SCHEMES]))
        if ".experts." in parts[0]:
            scheme = experts.setdefault(parts[0].split(".experts.")[0], scheme)
        if scheme != main or parts == ["lm_head"]:
            listed += [LayerRule(match=part, scheme=scheme) for part in parts]
    keep = "model.layers.0.self_attn.o_proj"
    return make_plan(
        get_scheme(main),
        [r for r in listed if r.match != keep],
        shaped(layers),
        FIXED,
    )


@pytest.mark.parametrize("layers", [DENSE, MOE], ids=["dense", "moe"])
@settings(max_examples=examples(40))
@given(data=st.data())
def test_vllm_resolves_every_layer_as_planned(layers: Sequence[str], data: st.DataObject):
    """Contract: vLLM's own resolution of config.json gives each module the plan's scheme and
    format. Blind spot: modules are stand-ins, so only a running engine shows what a model class
    passes as prefix and mapping.
    """
    plan = data.draw(plans(layers))
    config = plan.quantization_config()
    if config is None:
        assert set(plan.schemes.values()) == {get_scheme("bf16")}
        return
    quantized = {scheme.name for scheme in plan.schemes.values()} - {"bf16"}
    assert len(config["config_groups"]) == len(quantized)
    for name, parts in engine_modules(layers).items():
        assert {vllm_reads(config, name)} == {plan.schemes[part].name for part in parts}, name


@settings(max_examples=examples(20))
@given(data=st.data())
def test_compressed_tensors_resolves_every_layer_as_planned(data: st.DataObject):
    plan = data.draw(plans(DENSE))
    config = plan.quantization_config()
    if config is None:
        return
    with torch.device("meta"):
        model = tiny(tied=False)
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for name in DENSE:
        scheme = getattr(model.get_submodule(name), "quantization_scheme", None)
        expected = plan.schemes[name]
        assert (scheme is None) == (expected.quantization is None), name
        if scheme is not None:
            assert scheme_of_args(scheme.weights, scheme.input_activations) == expected
            assert scheme.format == expected.format


def test_a_config_says_whether_schemes_are_mixed():
    alone = plan_of("*.down_proj=w8a8", main="bf16").quantization_config()
    assert alone is not None
    assert alone["format"] == "int-quantized"
    assert alone["config_groups"]["group_0"]["targets"] == [
        f"model.layers.{i}.mlp.down_proj" for i in range(LAYERS)
    ]
    config = plan_of("*.down_proj=w8a8,first:1=bf16").quantization_config()
    assert config is not None
    assert config["format"] == "mixed-precision"
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == ["pack-quantized", "int-quantized"]
    assert sorted(config["ignore"]) == [
        "lm_head",
        *(n for n in sorted(DENSE) if ".0." in n and "down" not in n),
    ]


def test_mamba_layers_are_listed_by_every_name_that_vllm_asks_for():
    """Contract: a rule for one of them reaches vLLM's module in Granite-4-H and in Falcon-H1."""
    layers = [f"model.layers.{n}.mamba.{part}" for n in (0, 1) for part in ("in_proj", "out_proj")]
    config = plan_of("model.layers.1.mamba.in_proj=bf16", layers=layers).quantization_config()
    assert config is not None
    names = ["model.3.mixer", "model.layers.1.mamba", "model.layers.1.mixer"]
    assert config["ignore"] == [f"{name}.in_proj" for name in names]
    assert vllm_reads(config, "model.layers.1.mixer.in_proj") == "bf16"
    assert vllm_reads(config, "model.layers.0.mixer.in_proj") == "w4a16"
    assert vllm_reads(config, "model.2.mixer.in_proj") == "w4a16"


def test_experts_take_one_line_a_layer():
    """Contract: experts take one entry per layer.

    Otherwise config.json would hold thousands of names, and readers compare each module with each
    of them.
    """
    config = plan_of("first:1=bf16,*.self_attn.*=w8a8", layers=MOE).quantization_config()
    assert config is not None
    assert r"re:model\.layers\.0\.mlp\.experts\.\d+\.[^.]+$" in config["ignore"]
    targets = config["config_groups"]["group_0"]["targets"]
    assert targets == [rf"re:model\.layers\.{i}\.mlp\.experts\.\d+\.[^.]+$" for i in (1, 2)]


def tiny(tied: bool, kind: str = "qwen3", **changes: Any) -> Any:
    sizes = {
        **SIZES,
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": tied,
        **changes,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_tied_head_has_nothing_to_quantize(kind: str, device: str):
    scheme = get_scheme("w4a16")
    with torch.device(device):
        tied = tiny(True, kind)
        untied = tiny(False, kind)
    with pytest.raises(
        SchemeError,
        match=r"would quantize 'lm_head', which cannot be: this output head is tied",
    ):
        plan_layers(tied, scheme, rules("lm_head=w8a8"))
    assert plan_layers(untied, scheme, rules("lm_head=w8a8")).schemes["lm_head"].name == "w8a8"
    with pytest.raises(SchemeError, match="embedding is looked up, not multiplied"):
        plan_layers(tied, scheme, rules("model.embed_tokens=w8a8"))


def test_shapes_are_checked_against_each_layers_scheme():
    """Contract: a layer that the main scheme cannot hold is accepted if a rule gives it a scheme
    that can.
    """
    model = tiny(True, intermediate_size=192)
    with pytest.raises(
        SchemeError,
        match="down_proj' has 192 input columns, no multiple of the group size 128",
    ):
        plan_layers(model, get_scheme("w4a16"))
    assert plan_layers(model, get_scheme("w4a16"), rules("*.down_proj=w8a8"))
    with pytest.raises(SchemeError, match="down_proj' has 192 input columns"):
        plan_layers(model, get_scheme("w8a8"), rules("*.down_proj=w4a16"))
