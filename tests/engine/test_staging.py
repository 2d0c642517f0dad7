"""Versions made beside a running model, held against freshly loaded engines."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.quant.delta import VersionCache
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.types import LowBitTensor
from qarl.rollout.engine import EngineError
from qarl.rollout.vllm.engine import VllmEngine
from tests.support import Policies
from tests.support.engines import SEQUENCES, answers_when_fresh, make_model, stage, start_engine
from tests.support.profiles import thorough

Running = tuple[LowBitModel, VllmEngine]
PARTS = ("layers.1.self_attn.k_proj", "layernorm", "embed_tokens", "layers.0.mlp.down_proj", "")
"""Masters that change, by what is in their names: one of three that vLLM stacks, norms, the tied embedding, one alone,
all."""

SCHEMES = ("w4a16", "bf16", "w4a16-channel", "w8a8", "w4a8", "fp8", "w8a8 and its head")


@pytest.fixture(params=[scheme for scheme in SCHEMES if scheme == "w4a16" or thorough()])
def running(request: pytest.FixtureRequest, random_policy: Policies, tmp_path: Path) -> Iterator[Running]:
    scheme, _, head = request.param.partition(" and its ")
    folder = random_policy(scheme != "fp8" and not head)
    model = make_model(folder, scheme, "bfloat16", layers=f"lm_head={scheme}" if head else "[]")
    engine = start_engine(model, folder, tmp_path / "start")
    yield model, engine
    if VllmEngine._open:
        engine.close()


def change(model: LowBitModel, part: str, seed: int) -> None:
    """Move the masters that have `part` in their names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, master in model.masters.items():
            if part in name:
                master.add_(torch.randn(master.shape, generator=generator) * master.std() * 0.1 + 0.01)
    model.refresh()


def parameters(engine: VllmEngine) -> list[weakref.ref[torch.Tensor]]:
    """All of the engine's that hold anything."""
    models = engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    return [weakref.ref(tensor) for tensor in models[0].parameters() if tensor.numel()]


def test_layers_made_beside_the_model_are_those_of_a_fresh_engine(running: Running, tmp_path: Path):
    """Contract: only layers that changed are made, the engine answers as before until the swap, and then as one that
    loaded the version whole; after several, as a fresh one. Blind spot: as of `test_publish`'s."""
    model, engine = running
    sender, receiver = (VersionCache(0, model.low_bit_tensors()) for _ in range(2))
    made, answers = [], engine.logprobs(SEQUENCES)
    for version, part in enumerate(PARTS, 1):
        change(model, part, version)
        changed = receiver.apply(sender.make_delta(version, model.low_bit_tensors()), version, sender.digest)
        staged = stage(engine, {item.name: item.tensor for item in receiver.tensors()}, changed)
        made.append(len(staged._pairs))
        assert engine.logprobs(SEQUENCES) == answers
        replaced = parameters(engine) if part == "" else []
        gc.disable()
        try:
            staged.swap()
            assert not any(tensor() is not None for tensor in replaced), "the version before is let go of at once"
        finally:
            gc.enable()
        before, answers = answers, engine.logprobs(SEQUENCES)
        assert answers != before
        if version == 3:
            engine.load(model.low_bit_tensors(), version)
            assert engine.logprobs(SEQUENCES) == answers
    tied = int(model.config.tie_word_embeddings)
    assert made == [1, 4, 1 + tied, 1, 2 * (4 + 4) + 2 + 1]
    folder = Path(str(model.config.name_or_path))
    engine.close()
    assert answers_when_fresh(model, folder, tmp_path / "fresh") == answers


def test_a_head_whose_weight_a_kernel_keeps_is_tied_to_none():
    """Contract: layers that gave their weights to a kernel, as W8A8's do to oneDNN, share none."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from qarl.rollout.vllm.staging import _tied_heads

    head, layer = object.__new__(ParallelLMHead), object.__new__(ParallelLMHead)
    for module in (head, layer):
        torch.nn.Module.__init__(module)
        module.register_parameter("weight", None)
    assert _tied_heads([layer], {head: head, layer: layer}) == []


class Breaking(dict[str, torch.Tensor]):
    """A version whose reading breaks off half way."""

    def items(self) -> Any:
        yield from itertools.islice(super().items(), len(self) // 2)
        raise OSError("the link broke")


def test_a_version_that_cannot_be_made_leaves_the_model_as_it_was(running: Running):
    model, engine = running
    answers = engine.logprobs(SEQUENCES)
    change(model, "", 1)
    tensors = {item.name: item.tensor for item in model.low_bit_tensors()}
    lost = "model.layers.1.self_attn.v_proj.weight_scale"
    if lost in tensors:
        with pytest.raises(EngineError, match=r"more tensors for the layer of 'model.layers.1.self_attn.q_proj'"):
            stage(engine, {n: t for n, t in tensors.items() if n != lost}, [lost])
    with pytest.raises(EngineError, match=r"takes 'model.layers.7.mlp.up_proj'"):
        stage(engine, tensors, ["model.layers.7.mlp.up_proj.weight"])
    with pytest.raises(OSError, match="the link broke"):
        stage(engine, Breaking(tensors), list(tensors))
    assert engine.logprobs(SEQUENCES) == answers
    engine.load([LowBitTensor(n, t) for n, t in tensors.items()], 1)
    assert engine.logprobs(SEQUENCES) != answers
