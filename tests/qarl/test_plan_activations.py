"""The plan's activations on GPUs against what a forward leaves alive, on tensors of a real model's shape without
values. Blind spot: fragmentation, and what lives only while a layer computes."""

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.bench.launches.gpu import Products, stand_in
from qarl.bench.launches.measure import MODELS
from qarl.bench.launches.tally import Tally
from qarl.configs.load import config_file, load_config
from qarl.plan.memory import count_memory
from qarl.plan.shapes import shapes_of
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.operators.packing import pack
from qarl.quant.schemes import get_scheme

SEQUENCES, LENGTH, LAYERS = 16, 256, 3


class Alive(TorchDispatchMode):
    """Storages made within this context, and which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        gc.collect()
        return sum(count for storage, count in self._made.values() if not storage.expired())


def kept(config: dict[str, Any], scheme: str, checkpointing: bool) -> int:
    """Bytes that a forward leaves for its backward."""
    tally = Tally()
    with stand_in(tally), tally:
        with torch.device("meta"):
            masters = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        model = LowBitModel(masters, get_scheme(scheme), LayerContext(torch.bfloat16, "reference"))
        model.multiply_with(Products(tally))
        model.checkpoint_layers(checkpointing)
        tokens = torch.ones(SEQUENCES, LENGTH, dtype=torch.int64).to("meta")
        length = torch.full((SEQUENCES,), LENGTH).to("meta")
        wanted = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool).to("meta")
        with Alive() as alive:
            packed = pack(length, LENGTH, torch.zeros_like(length), torch.arange(SEQUENCES).to("meta"))
            hidden = model.hidden(tokens, wanted, None, packed)
            assert hidden.requires_grad
            return alive.bytes()


@pytest.mark.parametrize(("model", "scheme"), [("qwen3-1.7b", "w4a16"), ("qwen3-30b-a3b", "w8a8")])
def test_activations_are_those_a_forward_keeps(model: str, scheme: str):
    """Contract: within 2 %, without and with checkpointing. With it the plan counts one layer's more, which the
    backward makes again."""
    config = {**MODELS[model], "num_hidden_layers": LAYERS}
    planned = [planned_activations(config, scheme, checkpointing) for checkpointing in (False, True)]
    found = [kept(config, scheme, checkpointing) for checkpointing in (False, True)]
    found[1] += (found[0] - found[1]) // LAYERS + (found[1] // (LAYERS + 2))  # a layer's own, and its input
    assert planned == [pytest.approx(count, rel=0.02) for count in found]


def planned_activations(config: dict[str, Any], scheme: str, checkpointing: bool) -> int:
    settings = {
        "scheme": scheme, "learner.micro_batch_tokens": str(SEQUENCES * LENGTH),
        "learner.gradient_checkpointing": str(checkpointing).lower(), "rollout.kv_cache_gib": "1",
        "rollout.max_new_tokens": "2048",
    }  # fmt: skip
    run = load_config(config_file("tiny-qwen3"), settings)
    return count_memory(shapes_of(config, "model"), run, "cuda", 1).of("activations")
