"""Tests of which of vLLM's modules hold which layers of a checkpoint."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qarl.quant.graph.skeleton import skeleton_of
from qarl.rollout.vllm.names import checkpoint_names, layer_names, trace_names
from tests.support.learners import random_model

EMBEDDING = "model.embed_tokens"


@pytest.mark.parametrize("seed", range(8))
def test_weights_decide_whether_vllms_head_is_tied(seed: int, tmp_path: Path):
    """Contract: a head has a layer of its own if its weight is not the embedding's, whatever
    config.json says. A tied one has none, and keeps its own name for whoever asks.

    Drawn: what config.json says, and the head in the files: none, an equal or another one. vLLM's
    loader then shares the weight or gives the head its own (model_loader/weight_tying.py).
    """
    draw = random.Random(seed)
    tied = draw.random() < 0.5
    files = draw.choice(["none", "equal", "other"] if tied else ["equal", "other"])
    random_model(tied=tied).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if files != "none":
        tensors["lm_head.weight"] = tensors[f"{EMBEDDING}.weight"] + (files == "other")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    skeleton = skeleton_of(tmp_path, "Qwen3ForCausalLM", torch.float32, torch.device("cpu"))
    head: Any = skeleton.module.get_submodule("lm_head")
    embedding: Any = skeleton.module.get_submodule(EMBEDDING)
    head.weight = embedding.weight
    if files == "other":
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    trace_names(skeleton.module, skeleton.config)
    names = checkpoint_names(skeleton.module)
    assert (head in names) == (files == "other")
    assert names[embedding] == [EMBEDDING]
    if files != "other":
        assert layer_names(skeleton.module, "lm_head", head) == ["lm_head"]
        # of a model with pictures
        assert layer_names(skeleton.module, "language_model.lm_head", head) == ["lm_head"]
