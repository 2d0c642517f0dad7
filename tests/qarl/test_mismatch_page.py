"""`qarl mismatch`: layer by layer on tiny models in process, with a wrong layer planted; the page without a browser."""

import json
from typing import Any

import numpy as np
import pytest

from qarl.advice.mismatch import (
    LEARNERS,
    Investigation,
    LayerDeviation,
    ScoredLearner,
    layer_errors,
    scored,
    scored_learners,
)
from qarl.learner.batching import Batch
from qarl.page.mismatch import FAULTY, POINTS, faulty_layers, findings, mismatch_page
from qarl.quant.model.low_bit_model import LowBitModel
from tests.support.learners import batch_of, random_model
from tests.support.models import low_bit
from tests.support.moe_models import CONFIGS, random_moe

WRONG = "model.layers.1.mlp.up_proj"
Three = tuple[LowBitModel, LowBitModel, LowBitModel]


def three(scheme: str, moe: bool = False) -> Three:
    """plain, fake-quant and aligned."""
    models = []
    for kind in LEARNERS.values():
        masters = random_moe(CONFIGS["qwen3_moe"]) if moe else random_model()
        models.append(low_bit(masters, scheme, kernel=kind.kernel, operators=kind.operators, aligned=kind.aligned))
    plain, dequantized, aligned = models
    return plain, dequantized, aligned


def test_a_wrong_layer_is_found_and_named():
    """One layer of the aligned learner multiplies with scales 10 % too large, inside the stack the engine makes of gate
    and up: its kernel error is 0.1, within 5 %, no other layer is named, and the scheme's errors are as before."""
    models, batch = three("w4a16"), batch_of()
    before = {row.layer: row for row in layer_errors(*models, batch)}
    weight = models[2].linears[WRONG].codes()
    assert weight.scale is not None
    weight.scale.mul_(1.1)
    models[2].release_products()
    rows = layer_errors(*models, batch)
    assert [row.layer for row in faulty_layers(rows)] == [WRONG] and not faulty_layers(list(before.values()))
    found = {row.layer: row for row in rows}
    assert found.keys() == set(models[0].linears)
    assert found[WRONG].kernel == pytest.approx(0.1, rel=0.05)
    for layer, row in found.items():
        assert row.scheme == before[layer].scheme
        assert row.scheme == 0 if layer == "lm_head" else 0.02 < row.scheme < 0.3
        assert layer == WRONG or row.kernel < 0.01
    (named,) = (f for f in findings(scored_learners(investigation(models, batch)), rows, "") if f.level == "warning")
    assert named.text.startswith(f"{WRONG} multiplies otherwise than its codes say")


def test_experts_are_compared_as_layers():
    rows = {row.layer: row for row in layer_errors(*three("w4a16-g32", moe=True), batch_of())}
    experts = [row for layer, row in rows.items() if layer.endswith("mlp.experts")]
    assert len(experts) == 1 and all(0.02 < row.scheme < 0.5 and row.kernel < 0.02 for row in experts)


def investigation(models: Three, batch: Batch) -> Investigation:
    learners = {name: scored(model, batch) for name, model in zip(LEARNERS, models, strict=True)}
    layers = layer_errors(*models, batch)
    return Investigation(batch=batch, learners=learners, layers=layers, multiplies="its own layers", pitfalls=[])


def data_of(page: str) -> dict[str, Any]:
    return json.loads(page.split('id="data">', 1)[1].split("</script>", 1)[0])


def test_the_page_holds_what_was_measured():
    """Scatter, position and probability for each learner, every layer, text as text; no more points than it can
    draw."""
    count = 3 * POINTS
    generator = np.random.default_rng(0)
    sampler = -generator.random(count) * 5
    learners = [
        ScoredLearner(name, sampler, sampler + apart, np.full(3, POINTS), {"mean_abs": apart, "equal": 0.0, "k3": None})
        for name, apart in (("plain", 0.2), ("<b>aligned", 0.0))
    ]
    layers = [LayerDeviation(f"layer.{n}", 0.1, 1e-4 * (1 + FAULTY * (n == 7))) for n in range(20)]
    page = mismatch_page("model <script>", findings(learners, layers, "kernels & more"), learners, layers)
    data = data_of(page)
    assert [figure["id"] for figure in data["figures"]] == ["probabilities", "by-position", "by-probability"]
    assert all(len(line["x"]) == POINTS for line in data["figures"][0]["lines"])
    (figure,) = data["layers"]
    assert figure["labels"][7] == "layer.7" and [each["y"][7] for each in figure["lines"]] == [0.1, 6e-4]
    assert data["measured"] == [["mean_abs", 0.2, 0], ["equal", 0, 0]]
    assert "model &lt;script&gt;" in page and "kernels &amp; more" in page and "model <script>" not in page
    assert "{{" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
