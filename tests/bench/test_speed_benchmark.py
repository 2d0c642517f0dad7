"""`python -m benchmarks speed`: its counts, ratios and refusals, against values computed by hand. Whether an engine
is as fast as it is measured is left to the measurement."""

import pytest

from benchmarks.models import MODELS
from benchmarks.speed.figures import Spread, engine_rows, kept, step_rows
from benchmarks.speed.job import PHASES, Answer, Cell
from qarl.configs.errors import ConfigError
from qarl.planning.shapes import shapes_of


def step(sample: float, forward: float) -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0) | {"sample": sample, "forward": forward, "backward": 1.0}


def answer(decode: float, steps: dict[str, list[dict[str, float]]]) -> Answer:
    return Answer([Cell(10, 4, 2 * decode, decode)], steps)


ROUNDS = {
    "bf16": [answer(1.0, {"bf16": [step(8, 1), step(9, 2)]}), answer(4.0, {"bf16": [step(16, 3)]})],
    "w8a8": [
        answer(0.5, {"plain": [step(5, 1)], "qarl": [step(4, 2), step(6, 1.5)]}),
        answer(2.0, {"qarl": [step(8, 3)], "plain": [step(9, 3)]}),
    ],
}


def test_ratios_are_of_one_round_and_a_step_is_its_quickest_phases():
    """By hand. Round 1: bf16 takes 8 + 2 s, w8a8 samples in 4 s whichever learner there is and the rest takes 2 and
    2.5 s: 0.6 and 0.65 of bf16, 4 + 2 over 4 + 2.5 of the gain kept. Round 2: 16 + 4 and 8 + 4 s: all is kept.
    In the engine 4 sequences a step of 1 and 4 s are 4 and 1 tokens a second; w8a8 takes half as long in both."""
    rows = {(row.scheme, row.kind): row for row in step_rows(ROUNDS)}
    qarl, plain = rows["w8a8", "qarl"], rows["w8a8", "plain"]
    assert qarl.of_bf16 == Spread.of([0.65, 0.6]) and plain.of_bf16 == Spread.of([0.6, 0.6])
    assert qarl.kept == Spread.of([6 / 6.5, 1.0]) and plain.kept == Spread.of([1.0, 1.0])
    assert qarl.over_plain is not None and plain.over_plain is None
    assert qarl.over_plain.high == pytest.approx(0.5 / 6) and qarl.over_plain.low == 0
    # Sampling 70 % of bf16's step halves: 0.35 + 0.3 over 0.35 + 0.3 · 2.5/2; of the plain step 30 % grow by a quarter.
    assert qarl.kept_at_share is not None and qarl.kept_at_share.low == pytest.approx(0.65 / 0.725)
    assert qarl.over_plain_at_share is not None and qarl.over_plain_at_share.high == pytest.approx(0.3 * 0.25)
    assert qarl.sampling_speedup == Spread.of([2.0, 2.0]) and rows["bf16", "bf16"].kept is None
    assert kept(4, 2, 2) == 1.0 and kept(4, 6, 2) == 0.6

    bf16, low = engine_rows(ROUNDS)
    assert bf16.decode == Spread(2.5, 1.0, 4.0) and low.decode_over_bf16 == Spread(2.0, 2.0, 2.0)
    assert bf16.prefill == Spread(12.5, 5.0, 20.0)


def test_odd_decoders_are_refused():
    config = dict.fromkeys(("hidden_size", "vocab_size", "intermediate_size"), 8)
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    assert shapes_of(config, "m").kv_heads == 2 and shapes_of(config, "m").head_dim == 4
    with pytest.raises(ConfigError, match=r"config\.json has no vocab_size"):
        shapes_of({**config, "vocab_size": None}, "m")
    for odd in ({"kv_lora_rank": 4}, {"n_shared_experts": 1}, {"num_experts": 4, "mlp_only_layers": [0]}):
        with pytest.raises(ConfigError, match="which is not counted here"):
            shapes_of({**config, **odd}, "m")
    assert shapes_of(MODELS["150m"].config, "150m").parameters == 149_442_816 - 25 * 768 - 12 * 2 * 64  # norms
