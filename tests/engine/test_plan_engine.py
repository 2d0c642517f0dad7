"""Mixed plans through the real engine: audited, published, exported, reloaded, trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qarl.sync.audit import AuditError, audit, require_agreement
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher
from tests.support.engines import SEQUENCES, disturb, make_model, start_engine

MIXED = "first:1=bf16,*.down_proj=w8a8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "layers", "tied"),
    [
        ("w4a16", MIXED, True),
        ("bf16", r"re:.*self_attn\.[qkv]_proj=w8a8,last:1=w4a16", False),
        ("fp8", "model.layers.0.mlp.*=w4a16,lm_head=w8a8", False),
        ("w8a8", "*.o_proj=bf16,lm_head=w4a16", False),
    ],
)
def test_a_mixed_plan_is_audited_published_and_exported(
    random_policy: Callable[[bool], Path], tmp_path: Path, scheme: str, layers: str, tied: bool
):
    """Contract: the engine reports the plan's scheme for every layer, so that another plan is told layer by layer, and
    after publishes of changing weights answers, bit for bit, as a fresh engine on the export. A quantized head is
    reloaded too: its kernel holds raw pointers."""
    folder = random_policy(tied)
    model = make_model(folder, scheme, layers=layers)
    engine = start_engine(model, folder, tmp_path / "start")
    require_agreement(audit(model.layers(), engine.layers(), same_kernels=True))
    assert {row.name: row.scheme for row in engine.layers()} == {n: s.name for n, s in model.plan.schemes.items()}
    if layers == MIXED:
        with pytest.raises(AuditError) as error:
            require_agreement(audit(make_model(folder, "w4a16").layers(), engine.layers(), same_kernels=True))
        assert "layers.0.self_attn.q_proj: different ignore lists: the engine leaves this layer" in str(error.value)
        assert "layers.1.mlp.down_proj: scheme 'w4a16' (learner) and 'w8a8' (engine)" in str(error.value)
        assert "layers.1.mlp.up_proj" not in str(error.value)
    publisher = Publisher(model, engine, SEQUENCES, model.plan.bound, canary_every=5)
    before = engine.logprobs(SEQUENCES)
    for version in range(1, 11):
        disturb(model, version)
        publisher.publish(version)
    assert publisher.canary(10).mean_abs < 0.01
    after = engine.logprobs(SEQUENCES)
    engine.close()
    fresh = start_engine(model, folder, tmp_path / "fresh")
    reloaded = fresh.logprobs(SEQUENCES)
    fresh.close()
    assert after != before
    assert after == reloaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "layers"), [("w4a16", MIXED), ("fp8", "*.down_proj=w4a16,lm_head=w8a8"), ("bf16", "last:1=w4a16")]
)
def test_transformers_loads_a_mixed_export(
    random_policy: Callable[[bool], Path], tmp_path: Path, scheme: str, layers: str
):
    """Weight by weight: what transformers decompresses is what the learner multiplied with."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = random_policy(False)
    model = make_model(folder, scheme, layers=layers, kernel="reference")
    export_checkpoint(model, folder, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    theirs = loaded.state_dict()
    for name, linear in model.linears.items():
        assert linear.low_bit is not None
        assert torch.equal(theirs[f"{name}.weight"], linear.low_bit.dequantized(torch.bfloat16)), name
