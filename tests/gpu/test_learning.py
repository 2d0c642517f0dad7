"""Tests of settings that may change memory and time on a GPU but not what is learned: packing,
checkpointing, LoRA, gradients in parts. Nothing here has run yet. tests/learner/test_invariance.py
tests the same on CPUs.

Axes: B sequences, T tokens.
"""

import dataclasses
from typing import Any

import pytest
import torch

from qarl.configs.schema.lora import LoraConfig
from qarl.learner.batching import Batch
from qarl.quant.layers import straight_through
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.add_lora import add_adapters
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import get_scheme
from tests.support.gpu_schemes import need
from tests.support.kernels import needs_cuda
from tests.support.learners import (
    VOCABULARY,
    drift,
    logprob_gradients,
    random_batch,
    random_model,
)
from tests.support.tensors import seeded

pytestmark = [pytest.mark.gpu, needs_cuda("learning on GPUs")]
DEVICE = "cuda"
LENGTHS = [9, 40, 1, 25]
schemes = pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])


def learner(
    scheme: str, kernel: str = "auto", device: str = DEVICE, adapted: bool = False
) -> LowBitModel:
    masters: Any = random_model()
    masters.to(device)
    model = LowBitModel(masters, get_scheme(scheme), LayerContext(torch.bfloat16, kernel))
    if adapted:
        add_adapters(model, LoraConfig(rank=4), 0)
        for name, factor in model.masters.items():
            if name.endswith("lora_B"):
                noise = torch.randn(factor.shape, generator=seeded(1))
                factor.data.copy_(0.02 * noise)
    return model


def batch_on(device: str = DEVICE) -> Batch:
    batch = random_batch([max(2, length) for length in LENGTHS], VOCABULARY)
    moved = {
        f.name: v.to(device)
        for f in dataclasses.fields(batch)
        if torch.is_tensor(v := getattr(batch, f.name))
    }
    return dataclasses.replace(batch, **moved)


@schemes
def test_packed_padded_and_checkpointed_are_one_learner(scheme: str):
    """Contract: log-probs agree within 0.1 nats and gradients within 5 % of their mean, because
    codes of activations may flip in bfloat16. Sequences that saw each other would be off by nats.
    Checkpointing changes no bit.
    """
    need(scheme)
    model = learner(scheme)
    batch = batch_on()
    padded, expected = logprob_gradients(model, batch)
    packed, found = logprob_gradients(model, batch, packed=batch.packed())
    torch.testing.assert_close(packed, padded, rtol=0, atol=0.1)
    assert drift(found, expected)[1] <= 0.05
    model.set_gradient_checkpointing(True)
    again, other = logprob_gradients(model, batch, packed=batch.packed())
    # sums of gradients may change their order
    assert torch.equal(again, packed)
    assert drift(other, found)[1] <= 1e-3


@schemes
def test_adapters_learn_as_on_cpus(scheme: str):
    need(scheme)
    _, found = logprob_gradients(learner(scheme, adapted=True), batch_on())
    _, expected = logprob_gradients(
        learner(scheme, "reference", "cpu", adapted=True), batch_on("cpu")
    )
    assert found.keys() == expected.keys()
    assert all("lora" in name for name in found)
    on_cpu = {name: gradient.cpu() for name, gradient in found.items()}
    assert drift(on_cpu, expected)[1] <= 0.1


def test_a_weight_gradient_in_parts_is_the_whole_one(monkeypatch: pytest.MonkeyPatch):
    model = learner("w4a16")
    batch = batch_on()
    _, whole = logprob_gradients(model, batch)
    monkeypatch.setattr(straight_through, "LARGEST_PRODUCT", 10 * 128)
    _, parts = logprob_gradients(model, batch)
    assert drift(parts, whole)[1] <= 1e-3
