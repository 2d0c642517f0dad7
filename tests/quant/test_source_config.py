"""Fields of a model's config.json that transformers drops are in the exported one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from qarl.quant.checkpoint.source_config import with_source_fields

_SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_SOURCES: list[dict[str, Any]] = [
    {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": _LINEAR},
    {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": _LINEAR,
        "sliding_window_pattern": 2,
    },
    {"model_type": "lfm2", "block_ff_dim": 256, "full_attn_idxs": [1, 3]},
    {"model_type": "qwen3_next", "rope_theta": 1e7, "full_attention_interval": 2},
    {"model_type": "qwen3_5_text", "full_attention_interval": 2},
    {"model_type": "cohere2", "rope_theta": 5e4, "sliding_window_pattern": 2},
    {"model_type": "minimax_m2", "rope_theta": 5e6, "scoring_func": "sigmoid"},
    {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
    {"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1, 1, 0], "swa_head_dim": 16},
    {"model_type": "hy_v3", "first_k_dense_replace": 1, "route_norm": True},
    {"model_type": "jais2", "layer_plan": [{"heads": None}, {"heads": 2}], "is_scaled": False},
]


def _config(folder: Path, source: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(source))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("known", _SOURCES, ids=lambda known: known["model_type"])
def test_a_written_config_has_every_field_of_its_source_and_is_read_the_same(
    known: dict[str, Any], tmp_path: Path
):
    """Contract: also fields that no class knows, and nested ones.

    Blind spot: fields of classes that are in no list here.
    """
    generator = random.Random(known["model_type"])
    drawn = {f"field_{generator.randrange(1000)}": generator.random() for _ in range(3)}
    source = {**_SIZES, **known, **drawn, "torch_dtype": "float16", "transformers_version": "4.1"}
    shuffled = dict(generator.sample(sorted(source.items()), len(source)))
    config = _config(tmp_path, shuffled)
    written = with_source_fields(config.to_dict(), config)
    assert {**_SIZES, **known, **drawn}.items() <= written.items()
    assert written.get("torch_dtype") is None
    assert written["transformers_version"] != "4.1"
    other = tmp_path / "written"
    other.mkdir()
    reread = _config(other, written).to_dict()
    ours = config.to_dict()
    del reread["_name_or_path"], ours["_name_or_path"]
    assert {key: reread[key] for key in ours} == ours


def test_keys_that_transformers_reads_as_numbers_are_text_once(tmp_path: Path):
    """Contract: a config that transformers wrote has labels by "0" and "1", its class by 0 and 1,
    and the JSON writer sorts them.
    """
    labels = {"0": "LABEL_0", "1": "LABEL_1"}
    config = _config(tmp_path, {**_SIZES, "model_type": "llama", "id2label": labels})
    written = with_source_fields(config.to_dict(), config)
    assert json.loads(json.dumps(written, sort_keys=True))["id2label"] == labels


def test_a_source_field_that_a_change_in_python_overruled_is_left_out(tmp_path: Path):
    config = _config(
        tmp_path, {**_SIZES, "model_type": "llama", "rope_scaling": _LINEAR, "pretraining_tp": 1}
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 123.0}
    written = with_source_fields(config.to_dict(), config)
    assert "rope_scaling" not in written
    assert written["rope_parameters"]["rope_theta"] == 123.0


def test_a_language_model_has_the_fields_of_its_part_of_the_source(tmp_path: Path):
    """Contract: of a model that also takes pictures, `text_config` is the source."""
    text = {**_SIZES, "model_type": "qwen3_5_text", "full_attention_interval": 2, "drawn": 7}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "other": 1}
    config = _config(tmp_path, whole).get_text_config()
    config.name_or_path = str(tmp_path)
    written = with_source_fields(config.to_dict(), config)
    assert text.items() <= written.items()
    assert "other" not in written


def test_a_source_that_is_gone_or_of_another_model_adds_nothing(tmp_path: Path):
    config = _config(tmp_path, {**_SIZES, "model_type": "llama", "rope_theta": 5e5})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "rope_theta": 5e5}))
    assert "rope_theta" not in with_source_fields(config.to_dict(), config)
    (tmp_path / "config.json").unlink()
    assert "rope_theta" not in with_source_fields(config.to_dict(), config)
