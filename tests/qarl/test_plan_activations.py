"""The plan's activations against what a forward through the engine's model keeps for its backward, counted.

Blind spots: counted on a CPU, of small layers; what a GPU keeps besides, attention's output and sums, is by reading;
fragmentation, and what lives only while a dense layer computes.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.configs.load import config_file, load_config
from qarl.planning import memory
from qarl.planning.memory import count_memory
from qarl.planning.shapes import shapes_of
from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.graph.packing import Sequences
from qarl.quant.layers import grouped_backward
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.schemes import get_scheme
from tests.support.models import low_bit

LENGTHS, LAYERS, HIDDEN = (60, 70, 62), 3, 256
TOKENS = sum(LENGTHS)
DENSE = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 768, "head_dim": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    **DENSE, "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_activations_are_those_a_forward_keeps(config: dict[str, Any], scheme: str):
    """Contract: within 2 %, without and with checkpointing. With checkpointing the plan counts one layer's more, which
    the backward computes again, and the first layer's input as the others': a branch and a residual."""
    whole, checkpointed = (kept(config, scheme, checkpointing) for checkpointing in (False, True))
    column = TOKENS * HIDDEN * 2
    a_layer = (whole - 2 * column) / LAYERS  # without what the last norm keeps, and its output
    planned = [planned_activations(config, scheme, checkpointing, "cpu") for checkpointing in (False, True)]
    assert planned == [pytest.approx(whole, rel=0.02), pytest.approx(checkpointed + column + a_layer, rel=0.02)]


def test_a_gpu_keeps_what_attention_computed_besides():
    """Of w8a8, whose output projection keeps codes: attention's output, and a sum a head."""
    cpu, gpu = (planned_activations(DENSE, "w8a8", False, device) for device in ("cpu", "cuda"))
    assert gpu - cpu == pytest.approx(LAYERS * TOKENS * (2 * 4 * 64 + 4 * 4), abs=TOKENS)


@pytest.mark.parametrize("tokens", [512, 4096, 12288])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize(
    ("experts", "chosen", "hidden", "inner"), [(8, 2, 256, 128), (16, 4, 128, 256), (64, 2, 256, 128)]
)
def test_a_backward_of_experts_takes_no_more_than_planned(
    experts: int, chosen: int, hidden: int, inner: int, scheme: str, tokens: int, monkeypatch: pytest.MonkeyPatch
):
    """Contract: the plan's are above the peak of live storages, by a tenth at most. The grouped backward of GPUs, on a
    CPU, with fewer tokens at once."""
    assert memory._EXPERT_TOKENS == grouped_backward.TOKENS
    for module, name in ((memory, "_EXPERT_TOKENS"), (grouped_backward, "TOKENS")):
        monkeypatch.setattr(module, name, 2048)
    shape = ExpertsShape(experts, chosen, hidden, inner, "silu", ExpertLayout())
    gate_up, down = (nn.Parameter(torch.randn(experts, *size)) for size in ((2 * inner, hidden), (hidden, inner)))
    context = LayerContext(torch.bfloat16, "reference")
    context.gradients.configure(in_place=True)
    layer = RoutedLowBitExperts("model.layers.0.mlp.experts", gate_up, down, shape, get_scheme(scheme), context)
    layer.multiplies_grouped = lambda dy: True
    layer.refresh()
    gate_up.grad, down.grad = torch.zeros_like(gate_up), torch.zeros_like(down)
    x, (weights, index) = (
        torch.randn(tokens, hidden).bfloat16().requires_grad_(),
        torch.rand(tokens, experts).topk(chosen),
    )
    y, dy = layer(x, index, weights), torch.randn(tokens, hidden).bfloat16()
    with PeakBytes() as peak:
        y.backward(dy)
    sizes = {
        **EXPERTS, "hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts,
        "num_experts_per_tok": chosen,
    }  # fmt: skip
    settings = {
        "learner.micro_batch_tokens": str(tokens),
        "rollout.max_new_tokens": "64",
        "rollout.max_prompt_tokens": "64",
    }
    run = load_config(config_file("tiny-qwen3"), {**settings, "scheme": scheme, "rollout.prompts": "512"})
    planned = memory._Count(shapes_of(sizes, "model"), run, "cuda", 1).experts_backward()
    assert peak.most <= planned <= 1.1 * peak.most + 2**18, (planned / peak.most, peak.most)


class PeakBytes(TorchDispatchMode):
    """most: the largest sum of bytes of storages that were made within and lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._before |= {s._cdata for s in self._storages((args, kwargs))} - self._alive.keys()
        result = func(*args, **(kwargs or {}))
        for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
            self._bytes -= self._alive.pop(key)[1]
        for storage in self._storages(result):
            if storage._cdata not in self._alive and storage._cdata not in self._before:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._bytes += storage.nbytes()
        self.most = max(self.most, self._bytes)
        return result

    @staticmethod
    def _storages(tree: Any) -> list[torch.UntypedStorage]:
        return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def kept(config: dict[str, Any], scheme: str, checkpointing: bool) -> int:
    """Bytes of the storages with a row a token that autograd holds after a forward in bfloat16, and of its result."""
    torch.manual_seed(0)
    masters = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model = low_bit(masters, scheme, kernel="auto", operators="engine")
    model.checkpoint_layers(checkpointing)
    held: dict[int, torch.UntypedStorage] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > 1 and len(tensor) == TOKENS:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.arange(TOKENS) % config["vocab_size"]
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        hold(model.graph.hidden(tokens, Sequences.apart(LENGTHS)))
    return sum(storage.nbytes() for storage in held.values())


def planned_activations(config: dict[str, Any], scheme: str, checkpointing: bool, device: str) -> int:
    settings = {
        "scheme": scheme, "learner.micro_batch_tokens": str(TOKENS), "rollout.max_prompt_tokens": "64",
        "rollout.max_new_tokens": "64", "learner.gradient_checkpointing": str(checkpointing).lower(),
        "rollout.kv_cache_gib": "1",
    }  # fmt: skip
    run = load_config(config_file("tiny-qwen3"), settings)
    return count_memory(shapes_of(config, "model"), run, device, 1).of("activations")
