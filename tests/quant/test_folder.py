"""Tests of what a model folder's files say against training in it, before anything is loaded."""

import json
import random
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config

from qarl.configs.errors import ModelError
from qarl.quant.checkpoint.check_folder import (
    check_context,
    check_folder,
    check_model,
    check_rotary,
    check_steps,
    check_windows,
)
from qarl.quant.checkpoint.folder import has_chat_template, local_folder, tensor_shapes
from qarl.quant.checkpoint.load import load_config
from qarl.quant.checkpoint.settings import describe_towers, has_states, rounding_layers
from tests.support.learners import random_model
from tests.support.models import randomize, some_tokens


@pytest.mark.parametrize("name", ["a", "a/b/c", "a/", "/b", "./a/b", "~/b", "../a"])
def test_a_path_that_is_neither_a_folder_nor_a_hub_id_is_refused(name: str, tmp_path: Path):
    with pytest.raises(ModelError, match="does not exist; give a transformers folder, or a hub id"):
        local_folder(name)
    with pytest.raises(ModelError, match="is a file; give the folder"):
        local_folder(__file__)
    assert local_folder("owner/name") is None
    assert local_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("config", [None, "{}"])
@pytest.mark.parametrize("name", ["model.Q4_1.gguf", "MODEL.GGUF"])
def test_a_gguf_file_is_refused_with_the_python_that_makes_a_folder_of_it(
    name: str, config: str | None, tmp_path: Path
):
    """Contract: this holds for the file itself and for a folder that contains it.

    The suggested Python is compiled here; it was run by hand on one real file.
    """
    file = tmp_path / name
    file.touch()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="is a GGUF file; give the original checkpoint") as of_file:
        local_folder(str(file))
    with pytest.raises(ModelError, match="GGUF file") as of_folder:
        tensor_shapes(tmp_path) if config else check_model(tmp_path)
    for raised in (of_file, of_folder):
        script = str(raised.value).split("\n", 1)[1]
        compile(textwrap.dedent(script), "script", "exec")
        assert f"folder, file = {str(tmp_path)!r}, {name!r}" in script


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        pytest.param({"max_position_embeddings": 64}, 64, id="field"),
        pytest.param(
            {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}},
            128,
            id="linear scaling, old key",
        ),
        pytest.param(
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "linear", "factor": 4},
            },
            256,
            id="linear scaling, new key",
        ),
        pytest.param(
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "llama3", "factor": 8},
            },
            64,
            id="llama3 scaling",
        ),
        pytest.param(
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"full_attention": {"rope_type": "linear"}},
            },
            64,
            id="scaling per layer type",
        ),
        pytest.param(
            {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": "2"}},
            64,
            id="factor that is a text",
        ),
        pytest.param(
            {"max_position_embeddings": None, "n_positions": 16}, 16, id="null field, n_positions"
        ),
        pytest.param(
            {"max_position_embeddings": 64, "text_config": {"max_position_embeddings": 32}},
            32,
            id="nested text config",
        ),
        pytest.param({}, 1000000000, id="no field"),
    ],
)
def test_positions_bound_prompt_and_completion(
    config: dict[str, Any], longest: int, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_context(tmp_path, longest)
    if config:
        with pytest.raises(
            ModelError,
            match=f"= {longest + 1}, but the model .* has {longest} positions",
        ):
            check_context(tmp_path, longest + 1)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "yarn", "llama3"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters", "of layers"])
def test_rotations_that_depend_on_the_longest_sequence_are_refused(
    kind: str, place: str, tmp_path: Path
):
    rope = {"type" if place == "rope_scaling" else "rope_type": kind}
    config = (
        {"rope_parameters": {"full_attention": rope}} if place == "of layers" else {place: rope}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind in ("yarn", "llama3"):
        check_rotary(tmp_path)
    else:
        with pytest.raises(ModelError, match=f"rotary embeddings of type '{kind}'"):
            check_rotary(tmp_path)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_refused_with_a_remedy_that_computes_the_same(
    kind: str, seed: int, tmp_path: Path
):
    """Contract: the remedy is followed and accepted, and transformers' log-probs of sequences up to
    the original length are the same bits; removing rope_scaling is named as wrong.

    Drawn: the original length, and both factors of every frequency.
    """
    draw = random.Random(seed)
    length = draw.randint(8, 64)
    short, long = ([draw.uniform(low, 4.0) for _ in range(16)] for low in (1.0, 2.0))
    rope = {
        "type": kind,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": length,
    }
    config = Phi3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=0,
    ).to_dict() | {"rope_scaling": rope, "rope_parameters": None}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(
        ModelError,
        match=rf"within original_max_position_embeddings {length}, set long_factor to the values"
        r" of short_factor.*do not remove rope_scaling",
    ):
        check_rotary(tmp_path)
    rope["long_factor"] = short
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_text(json.dumps(config))
    check_rotary(changed, length)
    with pytest.raises(ModelError, match=rf"rollout\.max_new_tokens within {length}"):
        check_rotary(changed, length + 1)
    tokens = some_tokens(T=length)
    logits = []
    for folder in (tmp_path, changed):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        logits.append(randomize(model)(tokens).logits)
    assert torch.equal(*logits)


def test_dynamic_scaling_with_alpha_needs_another_base(tmp_path: Path):
    """Contract: the remedy's base is that of transformers' and vLLM's formula for HunYuan."""
    rope = {"type": "dynamic", "alpha": 1000.0}
    config = {"rope_theta": 10000.0, "head_dim": 32, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = 10000.0 * 1000.0 ** (32 / 30)
    with pytest.raises(ModelError, match=rf"set rope_theta to {re.escape(repr(base))}"):
        check_rotary(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mimo", "llama"])
@pytest.mark.parametrize("first", [0, 1, 3, 4])
@pytest.mark.parametrize("written", [False, True], ids=["derived", "layer_types"])
def test_a_window_on_some_layers_is_refused_where_vllm_refuses_it(
    kind: str, first: int, written: bool, tmp_path: Path
):
    """Contract: the families that vLLM builds as its Qwen2Model, and there only windows on some of
    the layers; the remedy depends on whether sequences fit into the window.
    """
    config = {
        "model_type": kind,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": first,
    }
    if written:
        config["layer_types"] = ["full_attention"] * first + ["sliding_attention"] * (4 - first)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind == "llama" or first in (0, 4):
        check_windows(tmp_path, 17)
        return
    with pytest.raises(ModelError, match="a window of 16 changes nothing") as fits:
        check_windows(tmp_path, 16)
    assert f"window of 16 on {4 - first} of its 4 layers" in str(fits.value)
    with pytest.raises(ModelError, match=r"\(here 17\) within the window"):
        check_windows(tmp_path, 17)
    config["use_sliding_window"] = False
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_windows(tmp_path, 17)


def test_a_model_is_described_by_its_files(tmp_path: Path):
    model = random_model(tied=False)
    model.save_pretrained(tmp_path)
    assert type(load_config(str(tmp_path))) is type(model.config)
    assert tensor_shapes(tmp_path) == {
        name: list(tensor.shape) for name, tensor in model.state_dict().items()
    }
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        tensor_shapes(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("in another format")
    assert tensor_shapes(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"model_type": "none_such"}')
    with pytest.raises(ModelError, match=r"its config\.json could not be read: .*none_such"):
        load_config(str(tmp_path))


def test_each_of_a_folders_files_is_checked(tmp_path: Path):
    random_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no tokenizer"):
        check_folder(tmp_path, 8)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_folder(tmp_path, 8)
    with pytest.raises(ModelError, match="positions"):
        check_folder(tmp_path, 10**9)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value, words in (
        ("quantization_config", {"quant_method": "awq"}, "awq"),
        ("rope_scaling", {"type": "dynamic"}, "rotary"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ModelError, match=words):
            check_folder(tmp_path, 8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        check_folder(tmp_path, 8)


def test_chat_templates_are_found_in_either_file(tmp_path: Path):
    for name, text, has in [
        ("config.json", "{}", False),
        ("tokenizer_config.json", "{}", False),
        ("tokenizer_config.json", '{"chat_template": "x"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("chat_template.jinja", "x", True),
    ]:
        (tmp_path / name).write_text(text)
        assert has_chat_template(tmp_path) == has


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"linear_num_key_heads": 2}, True),
        ({"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}, True),
        ({"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]}, True),
        ({"mamba_n_heads": 8, "layer_types": ["attention", "attention"]}, False),
        ({"text_config": {"ssm_state_size": 64}}, True),
        ({"state_size": None, "num_key_value_heads": 2}, False),
    ],
)
def test_layers_with_a_state_are_known_by_their_settings(
    settings: dict[str, Any], expected: bool, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert has_states(tmp_path) is expected


def test_a_smallest_step_that_vllm_does_not_know_is_refused_with_the_change(tmp_path: Path):
    file = tmp_path / "config.json"
    for settings, refused in [
        ({"model_type": "nemotron_h", "time_step_min": 0.001}, True),
        ({"model_type": "nemotron_h"}, True),
        ({"model_type": "nemotron_h", "time_step_min": 1e-30}, False),
        ({"model_type": "granitemoehybrid", "time_step_min": 0.001}, False),
    ]:
        file.write_text(json.dumps(settings))
        if not refused:
            check_steps(tmp_path)
            continue
        with pytest.raises(ModelError, match=r"0\.001.*set time_step_min to 1e-30"):
            check_steps(tmp_path)


@pytest.mark.parametrize(
    ("settings", "dtype", "expected"),
    [
        ({"linear_num_key_heads": 2}, "bfloat16", "gated delta nets"),
        ({"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]}, "float32", "Mamba-2 layers"),
        ({"mamba_num_heads": 8}, "bfloat16", "Mamba-2 layers"),
        ({"mamba_n_heads": 8, "layer_types": ["attention", "attention"]}, "bfloat16", ""),
        ({"state_size": 64, "chunk_size": 256}, "bfloat16", "Mamba-2 layers"),
        ({"state_size": 64}, "bfloat16", ""),
        ({"mamba_d_state": 16}, "bfloat16", ""),
        ({"conv_L_cache": 3}, "bfloat16", ""),
        ({"conv_L_cache": 3}, "float32", "short convolutions"),
        ({"conv_L_cache": 3, "conv_bias": True}, "float16", "short convolutions"),
    ],
)
def test_layers_that_round_prompts_otherwise_are_known_by_their_settings(
    settings: dict[str, Any], dtype: str, expected: str
):
    assert rounding_layers(settings, dtype) == expected


def test_parts_for_pictures_that_are_not_trained_are_named(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}, "vision_config": {}}))
    assert re.search(
        r"^text only: .* its part for pictures stays as it is and is exported with it$",
        describe_towers(tmp_path),
    )
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": None}))
    assert describe_towers(tmp_path) == ""
