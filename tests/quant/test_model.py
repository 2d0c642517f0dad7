"""Tests of a whole model over low-bit tensors: its stream of names and bytes, its masters'
gradients, its operators. A learner that computes in another dtype than the engine has its own
forward and backward and the engine's bytes.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qarl.configs.errors import ConfigError, GraphError
from qarl.configs.load import config_from_tree
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.run import LayerRule
from qarl.learner.learner import Learner
from qarl.learner.optim.loss_scale import PrecisionError
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import Forward, LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import (
    COMPUTE_DTYPES,
    SCHEMES,
    SchemeError,
    get_scheme,
    write_quantization_config,
)
from qarl.quant.types import LayerReport
from qarl.sync.publisher import Publisher
from tests.support import Policies, models
from tests.support.engines import SEQUENCES, start_engine
from tests.support.learners import batch_of
from tests.support.models import (
    all_logits,
    gradients,
    low_bit,
    qwen3,
    same_stream,
    some_tokens,
    stream_bytes,
)
from tests.support.moe_models import CONFIGS, random_moe
from tests.support.tensors import relative_error, seeded

LINEARS = [
    f"model.layers.{layer}.{part}"
    for layer in range(2)
    for part in (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
]
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
schemes = pytest.mark.parametrize("scheme", list(SCHEMES))


def plain_gradients(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    models.loss_of(model(input_ids=tokens).logits, tokens).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@tied_or_not
@schemes
def test_the_stream_is_the_storage_the_forward_uses(tied: bool, scheme: str):
    """Contract: streaming copies nothing.

    Addresses are equal for codes, scales, embeddings and norms; and writing into a streamed code
    changes the logits of newly built products.
    """
    model = low_bit(qwen3(tied), scheme)
    streamed = {item.name: item.tensor for item in model.low_bit_tensors()}
    for name, linear in model.linears.items():
        if tied and name == "lm_head":
            continue
        for suffix, tensor in linear.codes().tensors():
            # constants, no storage of the forward's
            if suffix not in ("weight_shape", "input_global_scale"):
                assert streamed[f"{name}.{suffix}"].data_ptr() == tensor.data_ptr()
    run = model.graph.module
    norms = "model.norm", "model.layers.1.self_attn.k_norm"
    read = {f"{name}.weight": run.get_submodule(name).weight for name in norms}
    tokens = torch.arange(models.VOCABULARY)
    assert torch.equal(
        run.get_submodule("model.embed_tokens")(tokens),
        streamed["model.embed_tokens.weight"],
    )
    for name, tensor in read.items():
        assert isinstance(tensor, torch.Tensor)
        assert streamed[name].data_ptr() == tensor.data_ptr()
        assert streamed[name].dtype == torch.bfloat16
    before = all_logits(model, some_tokens()).detach()
    name = "model.layers.0.mlp.up_proj"
    suffix, _ = next(iter(model.linears[name].codes().tensors()))
    streamed[f"{name}.{suffix}"].view(torch.uint8).fill_(0)
    model.release_kernels()
    assert not torch.equal(all_logits(model, some_tokens()), before)


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4", "fp8"])
def test_the_stream_is_the_same_with_either_operators(scheme: str):
    """Contract: layers that an engine stacks share a scale, also if the learner's graph is the
    engine's own.
    """
    engines, others = (
        low_bit(qwen3(), scheme, operators=operators) for operators in ("engine", "transformers")
    )
    assert same_stream(engines, stream_bytes(others))


@tied_or_not
@pytest.mark.parametrize(
    ("scheme", "aligned"),
    [("bf16", True), ("w4a16", False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_plain_autograds_without_quantization(
    tied: bool, dtype: torch.dtype, scheme: str, aligned: bool
):
    """Contract: if nothing is quantized, or if an unaligned learner multiplies its masters, float32
    masters with copies in the compute dtype train like the model cast to it. Logits are that
    model's bit for bit, and gradients agree within a few roundings.
    `test_engine_operators_compute_the_same_function` covers the engine's operators.
    """
    plain = qwen3(tied)
    operators = "transformers" if aligned else "auto"
    model = low_bit(copy.deepcopy(plain), scheme, dtype, operators=operators, aligned=aligned)
    assert model.operators == "transformers"
    tokens = some_tokens()
    plain = models.cast(plain, dtype)
    assert torch.equal(all_logits(model, tokens), plain(input_ids=tokens).logits)
    expected = plain_gradients(plain, tokens)
    for name, gradient in gradients(model, tokens).items():
        assert relative_error(gradient, expected[name]) < max(
            1e-4,
            4 * torch.finfo(dtype).eps,
        ), name


@tied_or_not
@schemes
@pytest.mark.parametrize("operators", ["engine", "transformers"])
def test_every_master_gets_a_gradient_and_those_of_micro_batches_add_up(
    tied: bool, scheme: str, operators: str
):
    """Contract: no parameter is left out of training.

    Gradients have the masters' dtype and shape, are finite and not all zero. Two backward passes
    before a step leave their sum in every master, copies and tied masters included, so nothing is
    overwritten or counted twice.
    """
    model = low_bit(qwen3(tied), scheme, operators=operators)
    first = some_tokens(2, 7, seed=1)
    second = some_tokens(3, 12, seed=2)
    one = gradients(model, first)
    two = gradients(model, second)
    assert one.keys() == model.masters.keys()
    assert len(one) == 2 + 2 * 11 + (not tied)
    gradients(model, first)
    models.loss_of(all_logits(model, second), second).backward()
    for name, master in model.masters.items():
        assert master.grad is not None
        assert master.grad.dtype == torch.float32
        assert master.grad.shape == master.shape
        assert one[name].any() and master.grad.isfinite().all(), name
        assert relative_error(master.grad, one[name] + two[name]) < 1e-6, name
        assert relative_error(master.grad, two[name]) > 0.01, name


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
def test_gradients_take_the_masters_dtype_and_streams_the_compute_dtype(
    master: torch.dtype, dtype: torch.dtype
):
    """Contract: any master dtype combines with any compute dtype.

    Gradients arrive in the master's dtype, and streams have the compute dtype.
    """
    model = low_bit(models.cast(qwen3(), master), "w8a8", dtype)
    found = gradients(model, some_tokens())
    assert found.keys() == model.masters.keys()
    assert {g.dtype for g in found.values()} == {master}
    items = list(model.low_bit_tensors())
    dtypes = {item.name.rpartition(".")[2]: item.tensor.dtype for item in items}
    assert dtypes["weight_scale"] == dtype
    assert {
        i.tensor.dtype for i in model.low_bit_tensors() if "norm" in i.name or "embed" in i.name
    } == {dtype}


@pytest.mark.parametrize(
    ("kind", "aligned"),
    [
        ("tied", True),
        ("untied", True),
        ("experts", True),
        ("experts", False),
    ],
)
@schemes
def test_only_refresh_makes_a_new_weight_version(kind: str, aligned: bool, scheme: str):
    """Contract: forward and stream stay at the last refresh's version.

    After a refresh they are those of a newly built model.
    """
    model = low_bit(policy(kind, 0), scheme, aligned=aligned)
    other = low_bit(policy(kind, 1), scheme, aligned=aligned)
    tokens = some_tokens()
    before = all_logits(model, tokens).detach()
    held = stream_bytes(model)
    with torch.no_grad():
        for name, master in model.masters.items():
            master.copy_(other.masters[name])
    assert torch.equal(all_logits(model, tokens), before)
    assert same_stream(model, held)
    model.refresh()
    assert torch.equal(all_logits(model, tokens), all_logits(other, tokens))
    assert same_stream(model, stream_bytes(other))


def test_an_error_in_a_published_forward_does_not_leave_the_model_aligned():
    """Contract: if a canary raises, the plain baseline does not turn into the aligned method."""
    model = low_bit(qwen3(), "w4a16", aligned=False)
    before = all_logits(model, some_tokens())
    with pytest.raises(KeyError), model.forward_as(Forward.PUBLISHED):
        raise KeyError
    assert {report.kernel for report in model.layer_reports()} == {"plain"}
    assert torch.equal(all_logits(model, some_tokens()), before)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "windowed": ("MistralConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", {"head_dim": 32}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "query_pre_attn_scalar": 16,
        },
    ),
}
"""Family → configuration class and its fields.

Qwen2 has no field head_dim and takes 128 / 4. Gemma 3 has a layer with a window and one without,
each with its own rotary embedding.
"""


def random_of(config: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of one of transformers' configuration classes."""
    configuration = getattr(transformers, config)(**{**models.SIZES, **changes})
    return models.randomize(AutoModelForCausalLM.from_config(configuration))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float32, 1e-5),
        (torch.float16, 3e-3),
        (torch.bfloat16, 2.5e-2),
    ],
)
def test_engine_operators_compute_the_same_function(family: str, dtype: torch.dtype, bound: float):
    """Contract: parameter names and order are unchanged.

    In float32, logits are transformers' up to the order of sums. In 16 bits they are within three
    roundings (relative Frobenius error), because they are rounded at other places. Gradients reach
    every parameter and in float32 are transformers' own.
    """
    if family == "gemma3" and dtype == torch.float16:
        pytest.skip("vLLM refuses it")
    config, changes = FAMILIES[family]
    plain = models.cast(random_of(config, **changes), dtype)
    names = [name for name, _ in plain.named_parameters()]
    tokens = some_tokens()
    theirs = plain(input_ids=tokens).logits
    expected = plain_gradients(plain, tokens)
    plain.zero_grad()
    engine = low_bit(plain, "bf16", dtype, operators="engine")
    assert [name for name, _ in engine.module.named_parameters()] == names == list(engine.masters)
    ours = all_logits(engine, tokens)
    assert ours.dtype == dtype
    assert relative_error(ours, theirs) < bound
    for name, gradient in gradients(engine, tokens).items():
        assert gradient.any(), name
        if dtype == torch.float32:
            assert relative_error(gradient, expected.pop(name)) < 1e-4, name
    assert dtype != torch.float32 or not expected


def is_untouched(model: PreTrainedModel, before: dict[str, torch.Tensor]) -> bool:
    """Return whether the model has the same parameters in the same plain torch modules."""
    now = dict(model.named_parameters())
    plain = not any(type(m).__module__.startswith("qarl.") for m in model.modules())
    if not plain or now.keys() != before.keys():
        return False
    return all(now[name] is before[name] for name in before)


@pytest.mark.parametrize("hidden", [96, 192, 136])
def test_widths_a_scheme_cannot_hold_are_refused_before_anything_changes(hidden: int):
    """Contract: every layer is checked first.

    The error names the first bad layer and counts the others, and the model is unchanged.
    """
    model = qwen3(hidden_size=hidden)
    before: dict[str, torch.Tensor] = dict(model.named_parameters())
    with pytest.raises(
        SchemeError,
        match=rf"'model\.layers\.0\.self_attn\.q_proj' has {hidden} input.*and 9 more",
    ):
        low_bit(model, "w4a16", operators="engine")
    assert is_untouched(model, before)
    projections = [m for name, m in model.named_modules() if name.endswith("_proj")]
    assert all(isinstance(module, nn.Linear) for module in projections)
    held = low_bit(model, "w8a8")
    assert held.operators == "engine"
    assert held.why_not_engine == ""


def test_models_that_cap_logits_after_the_head_need_the_engines_operators():
    """Contract: the engine's model caps them. transformers' forward ends at the head, so it refuses
    such a model.
    """
    model = random_of("Gemma2Config", final_logit_softcapping=2.0)
    before: dict[str, torch.Tensor] = dict(model.named_parameters())
    with pytest.raises(
        GraphError,
        match=r"final_logit_softcapping = 2\.0.*set learner\.operators to 'engine'",
    ):
        low_bit(model, "w8a8", operators="transformers")
    assert is_untouched(model, before)
    logits = all_logits(low_bit(model, "bf16"), some_tokens())
    expected = model(input_ids=some_tokens()).logits
    assert 1.5 < float(logits.abs().max()) <= 2
    assert relative_error(logits, expected) < 2.5e-2


def test_a_layer_rule_for_a_router_needs_the_engines_operators():
    """Contract: transformers' own operators multiply routers by their masters, so they would train
    another policy than the sampler's and are refused.
    """
    model = random_moe(CONFIGS["qwen3_moe"])
    context = LayerContext(torch.bfloat16, "reference")
    rules = [LayerRule(match="model.layers.1.mlp.gate", scheme="w8a8")]
    with pytest.raises(
        SchemeError,
        match=r"quantizes the router 'model\.layers\.1\.mlp\.gate', which transformers'",
    ):
        LowBitModel(model, get_scheme("w4a16"), context, "transformers", rules)


@tied_or_not
@schemes
def test_layers_and_quantization_config_agree(tied: bool, scheme: str):
    """Contract: the learner's side of the audit lists every linear layer once with its real scheme,
    and config.json ignores exactly the layers that are reported as unquantized, including a tied
    head.
    """
    model = low_bit(qwen3(tied), scheme)
    found = get_scheme(scheme)
    expected = [
        LayerReport(name, scheme, found.group_size, "torch.bfloat16", "dequantized")
        for name in LINEARS
    ]
    expected.append(LayerReport("lm_head", "bf16", None, "torch.bfloat16", "dequantized"))
    assert model.layer_reports() == expected
    config = model.plan.quantization_config()
    assert config == (
        None if scheme == "bf16" else write_quantization_config([(found, ["Linear"])], ["lm_head"])
    )


operators_of = pytest.mark.parametrize("operators", ["transformers", "engine"])
PLAIN: dict[str, Any] = {"operators": "transformers", "aligned": False}


def policy(kind: str, seed: int = 0) -> PreTrainedModel:
    return (
        random_moe(CONFIGS["qwen3_moe"], seed) if kind == "experts" else qwen3(kind == "tied", seed)
    )


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
@pytest.mark.parametrize(
    ("dtype", "compute"),
    [("bfloat16", "float32"), ("float16", "bfloat16"), ("bfloat16", "bfloat16")],
)
@operators_of
def test_the_engine_sees_its_own_dtype_and_the_learner_another(
    kind: str, dtype: str, compute: str, operators: str
):
    """Contract: the stream is that of an aligned learner in the engine's dtype, byte for byte,
    before and after the masters move. The forward is that of an unaligned model in the compute
    dtype, bit for bit. Within `Forward.PUBLISHED` it is the aligned one's, bit for bit, and
    afterwards it is restored.
    """
    plain = policy(kind)
    tokens = some_tokens()
    engine = COMPUTE_DTYPES[dtype]
    other = COMPUTE_DTYPES[compute]
    unaligned: dict[str, Any] = {
        "operators": operators,
        "aligned": False,
        "compute": other,
    }
    model = low_bit(copy.deepcopy(plain), "w4a16", engine, **unaligned)
    aligned = low_bit(copy.deepcopy(plain), "w4a16", engine, operators=operators)
    alone = low_bit(copy.deepcopy(plain), "w4a16", other, **unaligned)
    generator = seeded(1)
    with torch.no_grad():
        for moved in (False, True):
            if moved:
                for name, master in model.masters.items():
                    master.add_(torch.randn(master.shape, generator=generator) * 0.01)
                    for same in (aligned, alone):
                        same.masters[name].copy_(master)
                for each in (model, aligned, alone):
                    each.refresh()
            assert same_stream(model, stream_bytes(aligned))
            expected = all_logits(alone, tokens)
            assert expected.dtype == other
            assert torch.equal(all_logits(model, tokens), expected)
            with model.forward_as(Forward.PUBLISHED):
                assert torch.equal(all_logits(model, tokens), all_logits(aligned, tokens))
            assert torch.equal(all_logits(model, tokens), expected)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_an_aligned_learner_can_multiply_its_unquantized_masters(kind: str):
    """Contract: in `Forward.UNQUANTIZED`, an aligned model that a refresh moved is bit for bit the
    unaligned model of its masters, without int8 activations. Outside it is unchanged.
    """
    plain = policy(kind)
    tokens = some_tokens()
    aligned = low_bit(copy.deepcopy(plain), "w8a8", operators="transformers")
    unaligned = low_bit(plain, "w8a8", operators="transformers", aligned=False)
    for model in (aligned, unaligned):
        models.multiply_masters(model, 1.01)
    expected = all_logits(aligned, tokens)
    with aligned.forward_as(Forward.UNQUANTIZED):
        assert torch.equal(all_logits(aligned, tokens), all_logits(unaligned, tokens))
    assert torch.equal(all_logits(aligned, tokens), expected)
    assert not torch.equal(all_logits(unaligned, tokens), expected)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_a_float32_learner_has_float32_gradients(kind: str):
    """Contract: although the engine is bfloat16, gradients are those of autograd through
    transformers' fp32 model, up to fp32 rounding. bfloat16 anywhere in forward or backward would be
    off by 1e-3 or more.
    """
    plain = policy(kind)
    tokens = some_tokens()
    model = low_bit(copy.deepcopy(plain), "w4a16", **PLAIN, compute=torch.float32)
    found = gradients(model, tokens)
    models.loss_of(models.cast(plain, torch.float32)(input_ids=tokens).logits, tokens).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert relative_error(found[name], parameter.grad) < 2e-5, name


@pytest.mark.parametrize(
    ("dtype", "compute", "active"),
    [("bfloat16", "float16", True), ("float16", "float32", False)],
)
def test_the_loss_scale_follows_the_learners_dtype(dtype: str, compute: str, active: bool):
    model = low_bit(
        qwen3(),
        "w4a16",
        COMPUTE_DTYPES[dtype],
        **PLAIN,
        compute=COMPUTE_DTYPES[compute],
    )
    config = LearnerConfig.model_validate({"aligned": False, "compute_dtype": compute})
    assert Learner(model, config).loss_scale.active == active


def test_an_overflow_error_names_the_dtype_that_overflowed():
    """Contract: the norm's weight exceeds float16 and is within bfloat16, so the error blames the
    float16 learner and not its engine.
    """
    model = low_bit(qwen3(), "bf16", **PLAIN, compute=torch.float16)
    models.multiply_masters(model, 1e6, "model.norm.weight")
    config = LearnerConfig.model_validate({"aligned": False, "compute_dtype": "float16"})
    with pytest.raises(PrecisionError, match=r"float16 forward: .* learner.compute_dtype"):
        Learner(model, config).learn(batch_of(), step=0)


def test_a_compute_dtype_for_an_aligned_learner_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"compute_dtype 'float32' with learner.aligned true: .* engine's dtype",
    ):
        config_from_tree({"learner": {"compute_dtype": "float32"}})
    assert config_from_tree(
        {"learner": {"compute_dtype": "float32", "aligned": False}}
    ).learner.compute_dtype
    with pytest.raises(SchemeError, match="aligned learner multiplies the engine's codes"):
        LayerContext(torch.bfloat16, "reference", compute_dtype=torch.float32)


@pytest.mark.slow
def test_the_canary_compares_the_published_codes(random_policy: Policies, tmp_path: Path):
    """Contract: with a float32 learner the canary still multiplies the published codes in the
    engine's bfloat16. With the engine's operators it measures the same as for an aligned learner,
    not the gap of the plain float32 forward.
    """
    folder = random_policy(True)
    model, aligned = (
        low_bit(
            load_masters(folder, torch.float32),
            "w4a16",
            kernel="vllm",
            operators="engine",
            **how,
        )
        for how in ({"aligned": False, "compute": torch.float32}, {})
    )
    engine = start_engine(model, folder, tmp_path / "start", "bfloat16")
    try:
        ours = Publisher(model, engine, SEQUENCES, 0.05, 1).publish(1).canary
        theirs = Publisher(aligned, engine, SEQUENCES, 0.05, 1).publish(1).canary
    finally:
        engine.close()
    assert ours is not None
    assert ours == theirs
    assert ours.mean_abs < 1e-3
