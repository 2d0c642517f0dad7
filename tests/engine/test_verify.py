"""`qarl.verify.weights` of a running vLLM, whose kernels have repacked the weights.

Blind spot: dense models on CPUs; experts are reported as not compared.
"""

from pathlib import Path

import pytest

import qarl
from tests.support import Policies
from tests.support.drawn_checkpoints import read
from tests.support.engines import make_model, start_engine


@pytest.mark.parametrize("tied", [True, False])
def test_a_running_engine_is_compared_with_masters(
    tied: bool, random_policy: Policies, tmp_path: Path
):
    """Contract: of the trainer's masters every matrix is the engine's, and one that moved by 5 % of
    its spread is named.
    """
    folder = random_policy(tied)
    engine = start_engine(make_model(folder, "w4a16"), folder, tmp_path / "export")
    report = qarl.verify.weights(folder, engine._llm)
    masters = read(folder)
    layer = "model.layers.1.mlp.up_proj"
    weight = masters[f"{layer}.weight"]
    masters[f"{layer}.weight"] = weight + 0.05 * weight.std() * weight.sign()
    (cause,) = qarl.verify.weights(masters, engine._llm).faults
    engine.close()
    assert report.agrees, report.lines()
    quantized = [each for each in report.layers if each.engine_scheme != "unquantized"]
    assert {each.state for each in quantized} == {
        "codes of these masters, as the engine multiplies"
    }
    assert len(quantized) == 14  # two decoder layers of q, k, v, o, gate, up, down
    assert any(each.name == "model.embed_tokens" for each in report.layers)
    assert (cause.name, cause.about) == ("stale", (layer,))
