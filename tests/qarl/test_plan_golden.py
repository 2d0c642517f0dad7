"""What `qarl plan` counts for drawn configurations, kept so that a change of its sums is seen.

Record anew, where a change is meant: tests/support/records.py.
"""

import random
from typing import Any
from unittest import mock

import pytest

from qarl.configs.errors import ConfigError
from qarl.configs.load import config_file, load_config
from qarl.planning.choice import helping
from qarl.planning.machine import Machine, parse_machine
from qarl.planning.memory import _Count
from qarl.planning.plan import make_plan
from qarl.planning.shapes import EMBEDDED, NAMED
from qarl.planning.words import as_data, one_line, table, verdict
from tests.support.cases import cases
from tests.support.records import assert_recorded

CPU = Machine("CPUs", "cpu", 1, 64 * 2**30)
DRAWN = cases(__file__, "drawn")
"""The field → its values."""


def counted(count: _Count) -> dict[str, Any]:
    """Each number by its name, also those that the sums leave out as the smaller."""
    names = [name for name in vars(_Count) if not name.startswith("_") and name != "memory"]
    return {name: value() if callable(value := getattr(count, name)) else value for name in names}


# as on CPUs with AVX-512, whichever this is
@mock.patch("qarl.planning.memory._WIDE", ("fp8",))
def plans(part: int = 0, parts: int = 1, count: int = 80) -> dict[str, Any]:
    """By its options, each plan's numbers, words and remedies, or why there is none; every so many
    of those drawn.
    """
    rng = random.Random(0)
    all_plans = {}
    for number in range(count):
        name = rng.choice([*NAMED, *(name for name in EMBEDDED if name.startswith("tiny"))])
        machine, processes = rng.choice(
            [(CPU, 1), (CPU, 2), *((parse_machine(f"{n}x80GB"), n) for n in (1, 4, 8))]
        )
        fields = {key: rng.choice(values) for key, values in DRAWN.items()}
        said = f"{name} on {machine.name} by {processes}: " + " ".join(fields.values())
        if number % parts != part:
            continue
        try:
            config = load_config(config_file("paper/qwen3-8b-base"), {**fields, "model": name})
            plan = make_plan(config, {**NAMED, **EMBEDDED}[name], "", machine, processes)
        except ConfigError as error:
            all_plans[said] = str(error)[:60]
            continue
        words = [one_line(plan), verdict(plan), *table(plan)]
        counts = counted(_Count(plan.shapes, plan.config, machine.device, processes))
        helps = helping(plan) if number % 4 == 0 else {}
        all_plans[said] = {
            **as_data(plan),
            "helping": helps,
            "words": words,
            "counts": counts,
        }
    return all_plans


@pytest.mark.parametrize("part", range(20))
def test_plans_are_those_recorded(part: int):
    some = plans(part, 20)
    assert len(some) == 4
    for said, plan in some.items():
        assert_recorded(__file__, said, plan)
