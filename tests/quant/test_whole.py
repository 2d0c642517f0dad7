"""Language models beside towers for pictures: names, loading and the export of the whole.

tests/engine/test_families.py compares with what an engine samples.
"""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig
from transformers.utils.import_utils import is_torchvision_available

from qarl.quant.checkpoint.load import load_masters, model_skeleton
from qarl.quant.checkpoint.settings import inputs_beside_text
from qarl.quant.checkpoint.whole import Whole, processor_files, read_whole, whole_of
from qarl.quant.schemes import SchemeError
from qarl.sync.export import export_checkpoint, export_masters
from tests.support.kernels import no_cuda
from tests.support.models import low_bit, randomize, some_tokens
from tests.support.picture_models import transpose_stacks
from tests.support.tensors import seeded

TEXT = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
WHOLES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Qwen3VLConfig": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [12, 10, 10]}},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        {},
    ),
    "Qwen2_5_VLConfig": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [12, 10, 10]}},
        {**QWEN_TOWER, "fullatt_block_indexes": [0]},
        {},
    ),
    "Gemma3Config": ({"sliding_window": 8}, TOWER, {"mm_tokens_per_image": 4}),
    "Mistral3Config": (
        {"model_type": "mistral"},
        {**TOWER, "model_type": "pixtral", "head_dim": 16},
        {},
    ),
    "SmolVLMConfig": ({"model_type": "llama"}, TOWER, {"scale_factor": 2}),
    "LlavaNextConfig": (
        {"model_type": "llama"},
        {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        {},
    ),
    "Qwen3VLMoeConfig": (
        {
            **EXPERTS,
            "num_experts": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [12, 10, 10]},
        },
        {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        {},
    ),
    "Glm4vMoeConfig": (
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 6, 6],
            },
        },
        QWEN_TOWER,
        {},
    ),
}
"""Configuration's class → changes of its language model, its tower, and other fields."""
wholes = pytest.mark.parametrize(
    ("kind", "tied"), [(kind, number % 2 == 0) for number, kind in enumerate(WHOLES)]
)


def write_whole(kind: str, tied: bool, folder: Path) -> Any:
    """Write a random model with a tower and return it."""
    text, tower, others = WHOLES[kind]
    config = getattr(transformers, kind)(
        text_config={**TEXT, **text, "tie_word_embeddings": tied},
        vision_config=tower,
        tie_word_embeddings=tied,
        **others,
    )
    model = randomize(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
    model.save_pretrained(folder)
    if kind == "Qwen3VLMoeConfig":
        transpose_stacks(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return model


@wholes
def test_the_language_model_computes_as_the_whole_does(kind: str, tied: bool, tmp_path: Path):
    """Contract: of text, in float32, up to rounding; the skeleton has the masters' parameters."""
    whole = write_whole(kind, tied, tmp_path)
    masters = load_masters(tmp_path, torch.float32)
    tokens = some_tokens(2, 12)
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits
        actual = masters(input_ids=tokens).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    skeleton = model_skeleton(tmp_path)
    shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in masters.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "tied"), [("Qwen3VLConfig", True), ("Gemma3Config", True), ("SmolVLMConfig", False)]
)
def test_an_export_is_the_whole_with_its_tower_untouched(kind: str, tied: bool, tmp_path: Path):
    """Contract: names, config.json and the tower's bytes are the source's, and transformers loads
    it as the same class; the language model has its codes, and the tower none.
    """
    source = tmp_path / "source"
    write_whole(kind, tied, source)
    model = low_bit(load_masters(source, torch.float32), "w8a8", operators="transformers")
    export = tmp_path / "export"
    export_checkpoint(model, source, export)
    before = load_file(source / "model.safetensors")
    after: dict[str, torch.Tensor] = {}
    for file in export.glob("*.safetensors"):
        after |= load_file(file)
    whole = whole_of(model.config)
    assert whole is not None
    towers = {name for name in before if not whole.own_name(name)}
    assert towers
    assert all(torch.equal(after[name], before[name]) for name in towers)
    assert after.keys() - {f"{n}_scale" for n in before} == before.keys()
    written = json.loads((export / "config.json").read_text())
    quantization = written.pop("quantization_config")
    patterns = [re.compile(entry[3:]) for entry in quantization["ignore"] if entry[:3] == "re:"]
    assert all(any(pattern.match(name) for pattern in patterns) for name in towers)
    assert not any(pattern.match(name) for pattern in patterns for name in model.plan.schemes)
    expected = json.loads((source / "config.json").read_text())
    for level in (written, expected, written["text_config"], expected["text_config"]):
        level.pop("dtype", None)
        level.pop("tie_word_embeddings", None)
    assert written == expected
    assert (export / "preprocessor_config.json").is_file()

    plain = tmp_path / "plain"
    export_checkpoint(
        low_bit(load_masters(source, torch.float32), "bf16", operators="transformers"),
        source,
        plain,
    )
    export_masters(model, source, tmp_path / "masters")
    again = load_masters(tmp_path / "masters", torch.float32)
    assert all(torch.equal(p, model.loaded[name]) for name, p in again.named_parameters())
    assert read_whole(tmp_path / "masters") == replace(whole, settings=ANY)

    loader: Any = AutoModelForImageTextToText
    loaded, info = loader.from_pretrained(plain, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    rounded = load_masters(source, torch.float32)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    tokens = some_tokens(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=tokens).logits,
            rounded(input_ids=tokens).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def test_stacks_that_are_published_transposed_are_written_so(tmp_path: Path):
    """Contract: Qwen3-VL's mixtures have their experts' stacks transposed in checkpoints, and so
    has an export, of a model or of masters. Square ones are refused, because transformers tells by
    the shape.
    """
    source = tmp_path / "source"
    write_whole("Qwen3VLMoeConfig", False, source)
    before = load_file(source / "model.safetensors")
    masters = load_masters(source, torch.float32)
    model = low_bit(masters, "bf16", operators="transformers")
    export_checkpoint(model, source, tmp_path / "export")
    export_masters(model, source, tmp_path / "masters")
    for folder in ("export", "masters"):
        after: dict[str, torch.Tensor] = {}
        for file in (tmp_path / folder).glob("*.safetensors"):
            after |= load_file(file)
        assert after.keys() == before.keys()
        assert all(torch.equal(t, before[name].to(t.dtype)) for name, t in after.items())
    square = tmp_path / "square"
    settings = json.loads((source / "config.json").read_text())
    settings["text_config"]["moe_intermediate_size"] = 64
    square.mkdir()
    (square / "config.json").write_text(json.dumps(settings))
    shutil.copy(source / "model.safetensors", square)
    with pytest.raises(SchemeError, match="square matrices of 128 columns"):
        model_skeleton(square)


def test_names_of_drawn_prefixes_have_an_inverse():
    """Contract: `own_name` undoes the names that a checkpoint has, and knows no tower's."""
    generator = seeded(0)
    for prefix, head in (
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("model.text_model.", "lm_head"),
        ("model.", "lm_head"),
    ):
        whole = Whole({}, prefix, head)
        layer = int(torch.randint(99, (), generator=generator))
        for own in (f"model.layers.{layer}.mlp.up_proj.weight", "lm_head.weight"):
            beginning, written = next(p for p in whole.prefixes if own.startswith(p[0]))
            assert whole.own_name(written + own.removeprefix(beginning)) == own
        assert not whole.own_name("vision_tower.layers.0.weight")
        assert not whole.own_name("visual.blocks.0.weight")


@pytest.mark.parametrize(
    ("embedding", "layer", "own"),
    [
        ("model.language_model.embed_tokens", "model.language_model.layers.0", "model.layers.0"),
        (
            "language_model.model.decoder.embed_tokens",
            "language_model.model.decoder.layers.0",
            "model.decoder.layers.0",
        ),
        (
            "language_model.backbone.embeddings",
            "language_model.backbone.layers.0",
            "model.layers.0",
        ),
    ],
)
def test_a_prefix_stands_before_the_embedding(embedding: str, layer: str, own: str, tmp_path: Path):
    """Contract: also of OPT (BLIP-2) and Nemotron-H, whose embeddings have other names."""
    names = (embedding, f"{layer}.norm", "vision_model.embeddings.position_embedding", "mlp1.0")
    tensors = {f"{name}.weight": torch.zeros(1) for name in names}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": {}}))
    whole = read_whole(tmp_path)
    assert whole is not None
    assert whole.own_name(f"{layer}.norm.weight") == f"{own}.norm.weight"
    assert {*whole.towers} == {"vision_model", "mlp1"}


def test_names_that_were_written_by_earlier_releases_are_read_and_kept(tmp_path: Path):
    """Contract: `language_model.model.…` in the files is trained, exported and named so."""
    source = tmp_path / "source"
    write_whole("Gemma3Config", False, source)
    before = load_file(source / "model.safetensors")
    prefix = whole_prefix(before)
    renamed = {
        name.replace(prefix, "language_model.model.")
        .replace("lm_head", "language_model.lm_head")
        .replace("language_model.language_model", "language_model"): tensor
        for name, tensor in before.items()
    }
    save_file(renamed, source / "model.safetensors", metadata={"format": "pt"})
    model = low_bit(load_masters(source, torch.float32), "bf16", operators="transformers")
    export_checkpoint(model, source, tmp_path / "export")
    after: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "export").glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == renamed.keys()
    assert all(torch.equal(after[n].float(), renamed[n].to(after[n].dtype).float()) for n in after)


def whole_prefix(tensors: dict[str, torch.Tensor]) -> str:
    """Return what stands before "embed_tokens.weight" in a checkpoint's names."""
    (name,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    return name.removesuffix("embed_tokens.weight")


@no_cuda
def test_a_models_own_parameters_are_a_towers():
    """Contract: LLaVA-NeXT's `image_newline` belongs to the whole's class itself; no layer of the
    language model is left out with it. vLLM's Qwens write a tower's name with a dot, and
    LLaVA-OneVision's class only marks which parts it has. A model without an encoder (Gemma 4's
    unified class) names no tower, and its embedder of patches in no list; nor does vLLM's general
    class for models with pictures or sound (VibeVoice-ASR), in which all parts are one's parts.
    """
    from qarl.quant.kernels.engine_layers import without_towers

    parts = SimpleNamespace(tower_model=["vision_tower."], connector=["projector"])
    model = nn.Module()
    model.image_newline = nn.Parameter(torch.zeros(4))
    model.vision_tower = nn.Sequential(nn.Linear(2, 2))
    model.projector_head = nn.Linear(2, 2)
    names = ["vision_tower", "vision_tower.0", "projector_head"]
    assert [name for name, _ in without_towers(model)] == ["", *names]
    model.supports_multimodal = True  # type: ignore[assignment]
    assert [name for name, _ in without_towers(model)] == names
    model._tower_model_names = ["vision_tower"]  # type: ignore[assignment]
    assert [name for name, _ in without_towers(model)] == ["projector_head"]
    model.get_mm_mapping = lambda: parts  # type: ignore[assignment]
    assert [name for name, _ in without_towers(model)] == ["projector_head"]
    parts.tower_model = []
    parts.language_model = ["projector_head"]
    assert [name for name, _ in without_towers(model)] == ["projector_head"]
    whole = nn.Module()
    whole.model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("encoder", "language_model")})
    whole.lm_head = nn.Linear(2, 2)
    whole.get_mm_mapping = lambda: parts  # type: ignore[assignment]
    parts.language_model = ["model.language_model"]
    names = ["model", "model.language_model", "lm_head"]
    assert [name for name, _ in without_towers(whole)] == names


def test_sections_of_encoders_are_parts_beside_a_language_model():
    """Contract: VibeVoice-ASR has two for sound, Emu3 one for pictures; a model without a
    `text_config` has an encoder of text, or codes of pictures among its tokens.
    """
    names = ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    encoders: dict[str, Any] = {name: {"hidden_size": 8} for name in names}
    assert inputs_beside_text(encoders | {"text_config": {}}) == ["sound"]
    assert inputs_beside_text({"encoder_config": {}, "text_config": {}}) == ["sound"]
    assert inputs_beside_text({"vq_config": {}, "text_config": {}}) == ["pictures"]
    assert inputs_beside_text(encoders | {"vq_config": {}}) == []


def test_vllms_model_is_built_beside_the_files_of_its_processors(tmp_path: Path):
    """Contract: those of a whole's folder, which vLLM's general class reads; a model of text has
    none, nor has a configuration that was made in Python.
    """
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}, "audio_config": {}}))
    files = [tmp_path / name for name in ("tokenizer.json", "preprocessor_config.json")]
    for file in (*files, tmp_path / "model.safetensors"):
        file.touch()
    config = PreTrainedConfig()
    config.name_or_path = str(tmp_path)
    assert processor_files(config) == files
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert processor_files(config) == []
    assert processor_files(PreTrainedConfig()) == []


@no_cuda
def test_vllms_classes_import_beside_a_stand_in_for_torchvision():
    """Contract: a class whose image processors import torchvision in all its forms is imported;
    elsewhere torchvision is as missing as before.
    """
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed; this is about machines without it")
    from vllm.model_executor.models import registry

    from qarl.quant.kernels.vllm_gpu import load_plugins

    load_plugins()
    for name in ("InternVLForConditionalGeneration", "Gemma4ForConditionalGeneration"):
        entry = registry._MULTIMODAL_MODELS[name]
        lazy = registry._LazyRegisteredModel(f"vllm.model_executor.models.{entry[0]}", entry[1])
        assert lazy.load_model_cls().__name__ == name.replace("InternVL", "InternS1")
    with pytest.raises(ImportError):
        importlib.import_module("torchvision")
    assert not is_torchvision_available()
