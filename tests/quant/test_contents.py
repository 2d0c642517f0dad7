"""Tests of what happens when a checkpoint's files contradict its config.json.

Either the files are followed, or the model is refused by name before anything is loaded.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, HrmTextConfig

from qarl.configs.errors import ModelError
from qarl.learner.logprobs import token_logprobs
from qarl.planning.shapes import sizes_of
from qarl.quant.checkpoint.load import load_masters, model_skeleton
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.schemes import get_scheme
from qarl.sync.export import checkpoint_config, export_checkpoint, export_masters
from tests.support.learners import random_model
from tests.support.models import low_bit, some_tokens, stream_bytes
from tests.support.tensors import normal

EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], Tensors], object]


def folder_of(place: Path, change: Change, tied: bool = True) -> Path:
    """Write a random model whose config.json and tensors are then changed."""
    random_model(tied=tied).save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    tensors = load_file(place / "model.safetensors")
    change(config, tensors)
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def other_head(_: dict[str, Any], tensors: Tensors) -> None:
    """Add a head that differs from the embedding in its last element alone."""
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    tensors["lm_head.weight"] = head


def equal_head(_: dict[str, Any], tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()


@pytest.mark.parametrize(
    ("change", "tied", "expected"),
    [
        pytest.param(other_head, True, False, id="head of its own under a tie"),
        pytest.param(equal_head, True, True, id="equal second head under a tie"),
        pytest.param(lambda *_: None, True, True, id="tied"),
        pytest.param(lambda *_: None, False, False, id="untied"),
    ],
)
def test_the_files_decide_whether_a_head_is_tied(
    change: Change, tied: bool, expected: bool, tmp_path: Path
):
    """Contract: skeleton, masters, plan, export and the plan of memory agree with the files; an
    exported or continued checkpoint says so in its own config.json, and holds a head of its own.
    """
    folder = folder_of(tmp_path / "model", change, tied)
    skeleton = model_skeleton(folder)
    model = load_masters(folder, torch.float32)
    assert skeleton.config.tie_word_embeddings is model.config.tie_word_embeddings is expected
    schemes = [plan_layers(m, get_scheme("w8a8")).schemes for m in (skeleton, model)]
    assert schemes[0] == schemes[1]
    wrapped = low_bit(model, "w8a8")
    assert checkpoint_config(wrapped)["tie_word_embeddings"] is expected
    assert ("lm_head.weight" in stream_bytes(wrapped)) is not expected
    assert sizes_of(str(folder))[0].tied is expected
    export_checkpoint(wrapped, folder, tmp_path / "export")
    export_masters(wrapped, folder, tmp_path / "masters")
    again = load_masters(tmp_path / "masters", torch.float32)
    assert again.config.tie_word_embeddings is expected
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


def test_a_head_of_its_own_is_what_the_learner_multiplies_with(tmp_path: Path):
    """Contract: under tie_word_embeddings true the log-probs are those of transformers' model of
    the folder, up to rounding, and the head gets a gradient of its own.
    """
    folder = folder_of(
        tmp_path, lambda _, t: t.update({"lm_head.weight": normal(96, 128, seed=3) * 0.1})
    )
    tokens = some_tokens()
    masters = load_masters(folder, torch.float32)
    with torch.no_grad():
        expected = masters(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])
    model = low_bit(masters, "bf16", torch.float32)
    found, _ = token_logprobs(
        model,
        tokens,
        torch.ones_like(tokens[:, 1:], dtype=torch.bool),
    )
    assert torch.allclose(found, expected.squeeze(-1), atol=1e-4)
    found.sum().backward()
    assert model.masters["lm_head.weight"].grad is not None


def test_a_loaded_models_parameters_decide_over_its_config():
    """Contract: this also holds for a model that was loaded elsewhere, as TRL's trainer has it."""
    tied, untied = random_model(tied=True), random_model(tied=False)
    untied.config.tie_word_embeddings = True
    tied.config.tie_word_embeddings = False
    for model, expected in ((tied, True), (untied, False)):
        assert checkpoint_config(low_bit(model, "w8a8"))["tie_word_embeddings"] is expected


def drop(name: str) -> Change:
    return lambda _, tensors: tensors.pop(name)


def add(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: torch.zeros(shape)})


def setting(name: str, value: Any) -> Change:
    return lambda config, _: config.update({name: value})


def layers(count: int) -> Change:
    types = ["full_attention"] * count
    return lambda config, _: config.update({"num_hidden_layers": count, "layer_types": types})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(
            drop("lm_head.weight"),
            r"lacks 1 tensors, the first being 'lm_head\.weight'.*tie_word_embeddings false.*set"
            " tie_word_embeddings to true",
            id="untied without a head",
        ),
        pytest.param(
            setting("vocab_size", 104),
            r"'model\.embed_tokens\.weight' is \[96, 128\] in its files and \[104, 128\].*"
            r"vocab_size 104, in the files 96.*correct config\.json",
            id="vocab_size",
        ),
        pytest.param(
            layers(1),
            r"have 11 tensors for which .* no place \(num_hidden_layers 1\), the first being"
            r" 'model\.layers\.1\.",
            id="fewer layers than stored",
        ),
        pytest.param(
            layers(3),
            r"lacks 11 tensors, the first being 'model\.layers\.2\..*num_hidden_layers 3",
            id="more layers than stored",
        ),
        pytest.param(
            add("lm_head.bias", 96),
            r"have 1 tensors .* the first being 'lm_head\.bias'; training would leave them out",
            id="bias of the head",
        ),
        pytest.param(
            add("model.layers.0.self_attn.q_proj.bias", 256),
            r"attention_bias false\), the first being 'model\.layers\.0\.self_attn\.q_proj\.bias'",
            id="bias of a projection",
        ),
        pytest.param(
            setting("attention_bias", True),
            r"lacks 8 tensors, the first being 'model\.layers\.0\.self_attn\.k_proj\.bias'.*"
            "attention_bias true",
            id="biases that are not stored",
        ),
        pytest.param(
            drop("model.norm.weight"),
            r"lacks 1 tensors, the first being 'model\.norm\.weight'",
            id="norm",
        ),
        pytest.param(
            setting("intermediate_size", 512),
            r"mlp\..*intermediate_size 512, in the files 256",
            id="intermediate_size",
        ),
    ],
)
def test_files_and_config_of_different_models_are_refused_by_name(
    change: Change, says: str, tmp_path: Path
):
    """Contract: skeletons, which `qarl check` makes, refuse it as loading does."""
    folder = folder_of(tmp_path, change, tied=False)
    for read in (model_skeleton, lambda it: load_masters(it, torch.float32)):
        with pytest.raises(ModelError, match=says):
            read(folder)


def test_a_model_whose_tensors_transformers_cuts_apart_is_refused(tmp_path: Path):
    """Contract: HRM-Text's files have gate and up as one tensor, of which the model has two. The
    message says so, and not that files lack the two.
    """
    config = HrmTextConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"up_proj\.weight' out of tensors 'mlp\.gate_up_proj"):
        model_skeleton(tmp_path)


def test_a_tied_model_without_embedding_and_head_is_refused(tmp_path: Path):
    """Contract: one of the two stands for both; if neither is stored, the embedding is missed."""
    folder = folder_of(tmp_path, drop(EMBEDDING))
    with pytest.raises(ModelError, match=r"lacks 1 tensors, .* 'model\.embed_tokens\.weight'"):
        model_skeleton(folder)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(add("mtp.layers.0.q_proj.weight", 4, 4), id="head that predicts ahead"),
        pytest.param(add("visual.blocks.0.weight", 4, 4), id="image encoder"),
        pytest.param(add("model.visual.blocks.0.weight", 4, 4), id="encoder in the model"),
        pytest.param(add("v_head.summary.weight", 1, 128), id="value head"),
        pytest.param(
            add("model.layers.0.self_attn.rotary_emb.inv_freq", 32), id="rotary frequencies"
        ),
    ],
)
def test_parts_that_the_model_lacks_as_a_whole_are_left_out(change: Change, tmp_path: Path):
    folder = folder_of(tmp_path, change)
    model_skeleton(folder)
    load_masters(folder, torch.float32)
