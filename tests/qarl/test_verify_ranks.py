"""`qarl verify` of tensor-parallel ranks: the parts that vLLM's own layers hold are put together.

Blind spot: the ranks' layers stand in one process, unquantized, and HTTP is left out; experts that
ranks divide are not among them.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qarl.quant.kernels.held_weights import HeldWeights
from qarl.verify.engines import read_server
from qarl.verify.server import VllmServer

HIDDEN, HEADS, GROUPS, HEAD, MLP, WORDS = 64, 8, 2, 16, 96, 150


def whole() -> dict[str, torch.Tensor]:
    """Return random weights of one decoder layer, embedding and head, by vLLM's names."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "qkv_proj.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN),
        "qkv_proj.bias": ((HEADS + 2 * GROUPS) * HEAD,),
        "o_proj.weight": (HIDDEN, HEADS * HEAD),
        "gate_up_proj.weight": (2 * MLP, HIDDEN),
        "down_proj.weight": (HIDDEN, MLP),
        "embed_tokens.weight": (WORDS, HIDDEN),
        "lm_head.weight": (WORDS, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(s, generator=generator).bfloat16() for name, s in shapes.items()}


def rank_model(
    rank: int, ranks: int, tensors: dict[str, torch.Tensor], patch: pytest.MonkeyPatch
) -> nn.Module:
    """Return vLLM's layers as one rank of several holds them, loaded by their own loaders."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (parameter, linear, vocab_parallel_embedding):
        patch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    model = nn.Module()
    dtype = torch.bfloat16
    with set_current_vllm_config(VllmConfig()):
        layers = {
            "qkv_proj": linear.QKVParallelLinear(
                HIDDEN, HEAD, HEADS, GROUPS, bias=True, params_dtype=dtype
            ),
            "o_proj": linear.RowParallelLinear(
                HEADS * HEAD, HIDDEN, bias=False, params_dtype=dtype
            ),
            "gate_up_proj": linear.MergedColumnParallelLinear(
                HIDDEN, [MLP, MLP], bias=False, params_dtype=dtype
            ),
            "down_proj": linear.RowParallelLinear(MLP, HIDDEN, bias=False, params_dtype=dtype),
            "embed_tokens": vocab_parallel_embedding.VocabParallelEmbedding(
                WORDS, HIDDEN, params_dtype=dtype
            ),
            "lm_head": vocab_parallel_embedding.ParallelLMHead(WORDS, HIDDEN, params_dtype=dtype),
        }
        splits = {
            "qkv_proj": ([HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD], ["q", "k", "v"]),
            "gate_up_proj": ([MLP, MLP], [0, 1]),
        }
        for name, layer in layers.items():
            model.add_module(name, layer)
            for leaf, stored in layer.named_parameters():
                loader, tensor = stored.weight_loader, tensors[f"{name}.{leaf}"]
                if name not in splits:
                    loader(stored, tensor)
                    continue
                sizes, shards = splits[name]
                for part, shard in zip(tensor.split(sizes), shards, strict=True):
                    loader(stored, part, shard)
            layer.quant_method.process_weights_after_loading(layer)
    norm = nn.LayerNorm(HIDDEN, bias=False, dtype=dtype)
    norm.weight.data.copy_(tensors["norm.weight"])
    model.add_module("norm", norm)
    return model


class Worker(HeldWeights):
    """What a rank's worker has of what the extension reads."""

    def __init__(self, model: nn.Module):
        settings = SimpleNamespace(to_dict=lambda: {"hidden_size": HIDDEN})
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=settings, hf_config=SimpleNamespace()),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=False),
        )
        self.model_runner = SimpleNamespace(get_model=lambda: model)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_ranks_are_the_whole(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """Contract: every tensor is read back, of 4 ranks with two groups of keys too, each of which
    two ranks hold, and of words that do not divide into equal parts.
    """
    tensors = whole()
    workers = [Worker(rank_model(rank, ranks, tensors, monkeypatch)) for rank in range(ranks)]

    def call(server: VllmServer, method: str, **arguments: Any) -> Any:
        results = [getattr(worker, method)(**arguments) for worker in workers]
        return json.loads(json.dumps(results))

    monkeypatch.setattr(VllmServer, "call", call)
    monkeypatch.setattr(VllmServer, "model", lambda server: "policy")
    monkeypatch.setattr(VllmServer, "weight_version", lambda server: None)
    read = read_server("http://127.0.0.1:9").tensors
    assert read.keys() == tensors.keys()
    for name, stored in read.items():
        assert stored.shape == tuple(tensors[name].shape), name
        assert torch.equal(stored.load(), tensors[name]), name
