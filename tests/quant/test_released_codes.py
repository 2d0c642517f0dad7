"""Codes that are made again when they are needed, instead of being kept (`LowBitModel.release_codes`)."""

import pytest
import torch

from qarl.quant.materialize.code_changes import quantized_weights
from qarl.quant.model.kept_scales import keep_scales
from tests.support.learners import all_equal
from tests.support.models import all_logits, loss_of, low_bit, qwen3, some_tokens, stream_bytes
from tests.support.moe_models import CONFIGS, random_moe


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "nvfp4"])
@pytest.mark.parametrize("kept", [False, True])
def test_codes_that_are_not_kept_are_made_again_to_the_same_bits(scheme: str, kind: str, kept: bool):
    """Contract: logits, gradients and streams of each version are those of a model that keeps its codes; between uses
    no code has a value. With scales kept from version to version too."""
    if kept and scheme == "nvfp4":
        pytest.skip("its scales are not kept")
    build = qwen3 if kind == "dense" else lambda: random_moe(CONFIGS["qwen3_moe"])
    models = [low_bit(build(), scheme) for _ in range(2)]
    if kept:
        for model in models:
            keep_scales(model)
    models[1].release_codes()
    tokens = some_tokens()
    for _ in range(2):
        streams, grads = [], []
        for model in models:
            weights = [weight for layer in model.low_bit_layers() for weight in quantized_weights(layer.low_bit)]
            assert {weight.codes.device.type for weight in weights} == {"cpu" if model is models[0] else "meta"}
            loss_of(all_logits(model, tokens), tokens).backward()
            grads.append({name: master.grad for name, master in model.masters.items()})
            streams.append(stream_bytes(model))
            with torch.no_grad():
                for master in model.masters.values():
                    assert master.grad is not None
                    master.sub_(master.grad, alpha=0.5)
                    master.grad = None
            model.refresh()
        assert all_equal(*streams) and all_equal(*grads)
