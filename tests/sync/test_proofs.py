"""Tests of the checks on a publish, with constructed values: the audit, the step-0 gate, and the
tolerance of an export.
"""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT
from qarl.quant.types import LayerReport
from qarl.run.verify_export import difference_beyond
from qarl.sync.audit import AuditError, audit, require_agreement
from qarl.sync.gate import Gate, GateError, require_equal_logprobs

LAYER = LayerReport(
    name="a", scheme="w4a16", group_size=128, dtype="torch.bfloat16", kernel="Marlin"
)
OTHER: dict[str, Any] = {
    "scheme": "w8a8",
    "group_size": 32,
    "dtype": "torch.float16",
    "kernel": "Machete",
}


def test_the_audit_compares_every_field():
    """Contract: kernels are compared only if the learner claims the engine's.

    A layer that one side lacks is named.
    """
    assert OTHER.keys() == {field.name for field in fields(LayerReport)} - {"name"}
    require_agreement(audit([LAYER], [LAYER], same_kernels=True))
    for field, value in OTHER.items():
        with pytest.raises(AuditError, match=f"a: {field} .* {value!r}"):
            require_agreement(
                audit(
                    [LAYER],
                    [replace(LAYER, **{field: value})],
                    same_kernels=True,
                )
            )
    require_agreement(audit([LAYER], [replace(LAYER, kernel="Machete")], same_kernels=False))
    invariant = replace(LAYER, kernel=f"Marlin{BATCH_INVARIANT}")
    require_agreement(audit([invariant], [invariant], same_kernels=True, same_bits=True))
    with pytest.raises(AuditError, match="a: kernel 'Marlin' is not known to be batch-invariant"):
        require_agreement(audit([LAYER], [LAYER], same_kernels=True, same_bits=True))
    with pytest.raises(AuditError, match="a: scheme "):
        require_agreement(
            audit(
                [LAYER],
                [replace(LAYER, scheme="w8a8")],
                same_kernels=True,
                same_bits=True,
            )
        )
    for sides, who in (
        (([LAYER], []), "learner"),
        (([], [LAYER]), "engine"),
    ):
        with pytest.raises(AuditError, match=f"a: known to the {who} only"):
            require_agreement(audit(*sides, same_kernels=True))


@pytest.mark.parametrize(
    ("count", "rest"), [(8, ""), (9, "\n  … and 1 more"), (11, "\n  … and 3 more")]
)
def test_the_audit_shows_eight_layers_and_counts_the_rest(count: int, rest: str):
    ours, theirs = (
        [replace(LAYER, name=f"{n}", scheme=scheme) for n in range(count)]
        for scheme in ("w4a16", "w8a8")
    )
    with pytest.raises(AuditError) as error:
        require_agreement(audit([LAYER, *ours], [LAYER, *theirs], same_kernels=True))
    heading, shown = str(error.value).split("\ncheck that")[0].split(":\n", 1)
    assert heading == f"learner and engine disagree about {count} of {count + 1} layers"
    lines = [f"  {n}: scheme 'w4a16' (learner) and 'w8a8' (engine)" for n in range(8)]
    assert shown == "\n".join(lines) + rest


@pytest.mark.parametrize(
    ("sides", "leaves", "quantizes"),
    [
        (("w4a16", "bf16"), "engine", "learner"),
        (("bf16", "w8a8"), "learner", "engine"),
    ],
)
def test_different_ignore_lists_are_reported_by_layer_and_side(
    sides: tuple[str, str], leaves: str, quantizes: str
):
    other = replace(LAYER, name="b")
    ours = [replace(LAYER, scheme=sides[0]), other]
    theirs = [replace(LAYER, scheme=sides[1]), other]
    words = (
        f"a: different ignore lists: the {leaves} leaves this layer .* the {quantizes} quantizes it"
        " in 'w"
    )
    with pytest.raises(AuditError, match=f"disagree about 1 of 2 layers(.|\n)*{words}"):
        require_agreement(audit(ours, theirs, same_kernels=True))


EQUAL = measure_mismatch(
    torch.zeros(1, 2),
    torch.zeros(1, 2),
    torch.ones(1, 2, dtype=torch.bool),
)
DIFFERENT = replace(EQUAL, max_abs=1.0)


def never() -> Mismatch:
    raise AssertionError("nothing is to be measured")


def test_the_gate_passes_a_bound_that_is_set_and_no_more():
    gate = Gate(bound=0.5, tolerance=2.0)
    gate(replace(DIFFERENT, mean_abs_log_w=0.5, k3=9.0), never)
    for value in (0.51, math.nan, math.inf):
        with pytest.raises(GateError, match=f"is {value:.4g}, above the bound 0.5; they"):
            gate(replace(DIFFERENT, mean_abs_log_w=value), never)


@pytest.mark.parametrize(
    ("field", "limit"),
    [("mean_abs_log_w", 0.06), ("k3", 0.009)],
)
def test_the_gate_measures_bounds_if_none_is_set(field: str, limit: float):
    """Contract: they are three times a floor of 0.02, and nine times the floor
    of k3, which is quadratic.
    """
    gate = Gate(tolerance=3.0)
    floor = replace(DIFFERENT, mean_abs_log_w=0.02, k3=-0.001)
    gate(replace(DIFFERENT, **{field: 0.999 * limit}), lambda: floor)
    with pytest.raises(
        GateError,
        match=rf"above the bound {limit:g} \(3 times what two right implementations",
    ):
        gate(replace(DIFFERENT, **{field: 1.001 * limit}), lambda: floor)


def test_the_gate_measures_nothing_of_a_batch_that_is_equal():
    Gate(tolerance=0.1)(EQUAL, never)


def test_bitwise_is_equality():
    sampler = torch.full((1, 2), -0.75)
    mask = torch.ones(1, 2, dtype=torch.bool)
    require_equal_logprobs(measure_mismatch(sampler, sampler, mask), never)
    for first in (
        torch.nextafter(sampler, torch.zeros(1, 2))[0, 0].item(),
        math.nan,
    ):
        with pytest.raises(
            GateError,
            match=r"bitwise, and 50.00% of the sampled tokens .* (5.96e-08|nan) nats apart",
        ):
            require_equal_logprobs(
                measure_mismatch(torch.tensor([[first, -0.75]]), sampler, mask), never
            )


def test_an_export_is_held_to_bits_on_cpus_and_to_a_bound_on_cuda():
    expected = [[-1.0, -2.0], [-0.5]]
    near = [[-1.0, -2.0], [-0.5 - 3e-3]]
    assert difference_beyond(None, expected, expected) is None
    assert difference_beyond(None, near, expected) == ""
    assert difference_beyond(0.01, near, expected) is None
    said = ", by 0.001 nats a token in the mean, above the bound 0.0001 (sync.canary_bound)"
    assert difference_beyond(1e-4, near, expected) == said
    assert (
        difference_beyond(
            0.01,
            [
                [math.nan, -2.0],
                [-0.5],
            ],
            expected,
        )
        is not None
    )
