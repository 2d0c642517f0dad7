"""The plan's activations against what a forward through the engine's model keeps for its backward,
counted on a CPU, of small layers; and its learning against the peak of a forward and backward on a
GPU, traced on tensors without values.

Blind spots: kernels' workspaces, the allocator's rounding, NCCL; the optimizer's step and the
engine.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx.experimental._config as meta
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.configs.load import config_file, load_config
from qarl.learner.logprobs import _chunk
from qarl.planning.memory import Count, count_memory
from qarl.planning.shapes import shapes_of
from qarl.quant.graph.operators import Operator
from qarl.quant.graph.packing import Sequences
from qarl.quant.kernels import flash_attention as flash
from qarl.quant.layers import gradients
from qarl.quant.materialize import scales
from qarl.quant.runtime.shards import Shard, share
from tests.support.models import PUBLISHED, low_bit

LENGTHS = (60, 70, 62)
TOKENS = sum(LENGTHS)
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
LAYERS = DENSE["num_hidden_layers"]
HIDDEN = DENSE["hidden_size"]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_activations_are_those_a_forward_keeps(config: dict[str, Any], scheme: str):
    """Contract: within 2 %, without and with checkpointing. With checkpointing the plan counts one
    layer's more, which the backward computes again, and the first layer's input as the others': a
    branch and a residual.
    """
    whole, checkpointed = (kept(config, scheme, checkpointing) for checkpointing in (False, True))
    column = TOKENS * HIDDEN * 2
    # without what the last norm keeps, and its output
    a_layer = (whole - 2 * column) / LAYERS
    planned = [
        planned_activations(config, scheme, checkpointing, "cpu") for checkpointing in (False, True)
    ]
    assert planned == [
        pytest.approx(whole, rel=0.02),
        pytest.approx(checkpointed + column + a_layer, rel=0.02),
    ]


def kept(config: dict[str, Any], scheme: str, checkpointing: bool) -> int:
    """Bytes of the storages with a row a token that autograd holds after a forward in bfloat16, and
    of its result.
    """
    torch.manual_seed(0)
    masters = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model = low_bit(masters, scheme, kernel="auto", operators="engine")
    model.set_gradient_checkpointing(checkpointing)
    held: dict[int, torch.UntypedStorage] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > 1 and len(tensor) == TOKENS:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.arange(TOKENS) % config["vocab_size"]
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        hold(model.graph.hidden(tokens, Sequences.apart(LENGTHS)))
    return sum(storage.nbytes() for storage in held.values())


def planned_activations(
    config: dict[str, Any], scheme: str, checkpointing: bool, device: str
) -> int:
    settings = {
        "scheme": scheme,
        "learner.micro_batch_tokens": str(TOKENS),
        "rollout.max_prompt_tokens": "64",
        "rollout.max_new_tokens": "64",
        "learner.gradient_checkpointing": str(checkpointing).lower(),
        "rollout.kv_cache_gib": "1",
    }
    run = load_config(config_file("tiny-qwen3"), settings)
    parts = count_memory(shapes_of(config, "model"), run, device, 1).parts
    return next(part.bytes for part in parts if part.name == "activations")


class Peak(TorchDispatchMode):
    """bytes: most that tensors made within had at once. paused: counting none as most, as in a
    compiled kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.now = 0
        self.paused = False
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_C":  # vLLM's, which write into what they are given
            return None
        result = func(*args, **(kwargs or {}))
        before = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in (t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_meta):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and tensor.nbytes:
                self.now += storage.nbytes() - self.alive.pop(storage._cdata, (None, 0))[1]
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.now > self.bytes and not self.paused:
            for key in [key for key, (storage, _) in self.alive.items() if storage.expired()]:
                self.now -= self.alive.pop(key)[1]
            self.bytes = max(self.bytes, self.now)
        return result

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.paused = True
            try:
                return function(*arguments)
            finally:
                self.paused = False

        return call


class Products:
    """Products of engine's layers: each makes its output and nothing else."""

    def linear(
        self, name: str, weights: Any, biases: Any, like: Any = None
    ) -> Callable[..., torch.Tensor]:
        return lambda x: x.new_empty(len(x), sum(weight.shape[0] for weight in weights))

    def experts(
        self,
        layer: str,
        shape: Any,
        weights: Any,
        biases: Any = (),
    ) -> Callable[..., torch.Tensor]:
        return lambda x, *routed: torch.empty_like(x)


@pytest.fixture(scope="module")
def eight_processes() -> Iterator[DeviceMesh]:
    """Return the mesh of eight processes, of which this one is the first and the others are not
    there: nothing is sent.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def share_masters(masters: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by its first process's rows; a tied one by the same."""
    shared: dict[int, nn.Parameter] = {}
    for module in masters.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, shared.setdefault(id(parameter), share(parameter, mesh)))


def traced(
    config: dict[str, Any],
    scheme: str,
    tokens: int,
    checkpointing: bool,
    monkeypatch,
    mesh: DeviceMesh | None,
) -> int:
    peak = Peak()
    monkeypatch.setattr(
        torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta), raising=False
    )
    for place, name, value in (
        (flash, "takes", lambda *query: True),
        (flash, "_engine_version", lambda *query: None),
        (scales, "_look", lambda extremes: None),
        (gradients, "compiled", peak.kernel),
        (Shard, "reduce", lambda shard, whole, dtype: lambda: shard.rows(whole)),
    ):
        monkeypatch.setattr(place, name, value)
    with torch.device("meta"):
        masters = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.float32
        )
    if mesh is not None:
        share_masters(masters, mesh)
    model = low_bit(masters, scheme, operators="engine")
    model.context.multiply_with(Products())  # pyright: ignore[reportArgumentType]
    model.set_gradient_checkpointing(checkpointing)
    model.gradients.configure(in_place=mesh is None, fp32_input_grad=False, compiled=True)
    for master in model.masters.values():
        master.grad = torch.zeros_like(master)
    for module in model.graph.module.modules():
        operator = getattr(module, "_forward_method", None)
        if isinstance(operator, Operator):
            operator.is_native = False
            if type(module).__name__ == "SiluAndMul":
                operator.method = lambda x: x.new_empty(len(x), x.shape[1] // 2)
    counts_rows = meta.patch(  # pyright: ignore[reportAttributeAccessIssue]
        meta_nonzero_assume_all_nonzero=True
    )
    with counts_rows, peak:
        ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
        hidden = model.graph.hidden(ids, Sequences.apart([256] * (tokens // 256)))
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        parts = zip(hidden.split(512), ids.split(512), strict=True)
        picked: list[Any] = [
            checkpoint(_chunk, model.head, *part, True, 1.0, **how) for part in parts
        ]
        del hidden
        torch.cat([logprobs for logprobs, _ in picked]).sum().backward()
    return peak.bytes


@pytest.mark.parametrize(
    ("scheme", "checkpointing", "sharded"),
    [
        ("w4a16", True, False),
        ("w4a16", False, True),
        ("w8a8", True, True),
        ("w8a8", False, False),
    ],
)
@pytest.mark.parametrize("tokens", [4096, 22528])
@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-30b-a3b"])
def test_learning_takes_no_more_than_planned(
    name: str,
    tokens: int,
    scheme: str,
    checkpointing: bool,
    sharded: bool,
    monkeypatch: pytest.MonkeyPatch,
    eight_processes: DeviceMesh,
):
    """Contract: planned ≥ traced, by a tenth at most, of three layers; a replay under AdamW has no
    engine and no step that is larger, and of so few layers a checkpoint would be.
    """
    monkeypatch.setattr(Count, "saving", lambda count: 0)
    config = {**PUBLISHED[name], "num_hidden_layers": 3}
    settings = {
        "scheme": scheme,
        "learner.micro_batch_tokens": tokens,
        "learner.gradient_checkpointing": checkpointing,
        "rollout.max_new_tokens": 1024,
        "rollout.max_prompt_tokens": 512,
        "rollout.prompts": 128,
        "learner.optimizer.name": "adamw",
        "learner.diagnostics_every": 0,
        "from_rollouts": "run",
        "eval.problems": 0,
        "export": False,
    }
    run = load_config(
        config_file("tiny-qwen3"),
        {key: str(value).lower() for key, value in settings.items()},
    )
    plan = count_memory(shapes_of(config, "model"), run, "cuda", 8 if sharded else 1)
    temporary = ("activations", "working", "sent gradients")
    planned = sum(part.bytes for part in plan.parts if part.name in temporary)
    mesh = eight_processes if sharded else None
    peak = traced(config, scheme, tokens, checkpointing, monkeypatch, mesh)
    assert peak <= planned <= 1.1 * peak
