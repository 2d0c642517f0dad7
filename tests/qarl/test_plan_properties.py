"""Properties of `qarl plan` over configurations drawn at random.

test_plan.py and test_plan_activations.py hold the sums to arithmetic and to what layers keep. Here
stands what must be true of every plan, whatever its numbers are.
Blind spot: a part that is wrong by the same factor everywhere.
"""

import random
import re
from collections.abc import Mapping
from unittest import mock

import pytest

from qarl.configs.errors import ConfigError
from qarl.configs.flags import FLAGS
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.run import RunConfig
from qarl.planning.choice import helping
from qarl.planning.machine import Machine, parse_machine
from qarl.planning.memory import GIB, Memory, count_memory
from qarl.planning.plan import MemoryPlan, make_plan
from qarl.planning.shapes import EMBEDDED, NAMED
from qarl.planning.words import as_data, one_line, table, verdict

CPU = Machine("CPUs", "cpu", 1, 64 * GIB)
SHAPES = {**NAMED, **{name: shapes for name, shapes in EMBEDDED.items() if "tiny" in name}}
DRAWN = {
    "scheme": ["w4a16", "w8a8", "fp8", "bf16", "w4a8"],
    "dtype": ["bfloat16", "float32"],
    "rollout.servers": ["null", "2"],
    "rollout.enforce_eager": ["false", "true"],
    "rollout.max_new_tokens": ["512", "8192"],
    "rollout.kv_cache_gib": ["null", "4"],
    "quantization.kv_cache": ["null", "fp8"],
    "learner.aligned": ["true", "true", "false"],
    "learner.master_dtype": ["float32", "bfloat16"],
    "learner.optimizer.name": ["muon", "adamw"],
    "learner.optimizer.offload": ["none", "cpu"],
    "learner.lora.name": ["none", "none", "lora"],
    "learner.kl.name": ["none", "k3"],
    "learner.keep_codes": ["true", "false"],
    "learner.keep_kernel_layout": ["true", "true", "true", "true", "false"],
    "learner.gradient_checkpointing": ["auto", "true", "false"],
    "learner.micro_batch_tokens": ["10240", "40960"],
}
"""Field → the values it is drawn from."""

Drawn = tuple[str, Machine, int, dict[str, str]]
"""A model's name, a machine, the number of processes, and fields of the configuration."""


def drawn(seed: int) -> Drawn:
    """Draw until the fields allow each other; about half of the draws do."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(list(SHAPES))
        machine, processes = rng.choice(
            [(CPU, 1), (CPU, 2), *((parse_machine(f"{n}x80GB"), n) for n in (1, 4, 8))]
        )
        fields = {key: rng.choice(values) for key, values in DRAWN.items()}
        if loaded(name, fields) is not None:
            return name, machine, processes, fields


def loaded(name: str, fields: Mapping[str, str]) -> RunConfig | None:
    """Return the paper's configuration with these fields, or None if they contradict each other."""
    try:
        return load_config(config_file("paper/qwen3-8b-base"), {**fields, "model": name})
    except ConfigError:
        return None


def planned(case: Drawn) -> MemoryPlan:
    name, machine, processes, fields = case
    config = loaded(name, fields)
    assert config is not None
    return make_plan(config, SHAPES[name], "", machine, processes)


def counted(case: Drawn, **changes: str) -> Memory | None:
    """Count the case with other fields, `__` for a dot, and nothing decided by the plan."""
    name, machine, processes, fields = case
    settled = {"rollout.kv_cache_gib": "4", "learner.gradient_checkpointing": "true"}
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    config = loaded(name, {**fields, **settled, **changed})
    return config and count_memory(SHAPES[name], config, machine.device, processes)


@pytest.fixture(autouse=True)
def cpus_with_avx512():
    """Count as for a CPU whose fp8 products are in fp32, whichever this one is."""
    with mock.patch("qarl.planning.memory._WIDE", ("fp8",)):
        yield


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_adds_up_and_says_what_it_counted(seed: int):
    plan = planned(drawn(seed))
    parts = {part.name: part.bytes for part in plan.memory.parts}
    assert all(size > 0 for size in parts.values())
    assert plan.memory.total == sum(parts.values())
    data = as_data(plan)
    assert data["parts"] == parts
    assert data["fits"] == (plan.memory.total <= plan.capacity and not plan.lacks_host)
    total = f"{plan.memory.total / GIB:.1f}"
    assert one_line(plan).startswith(f"{total} of {plan.capacity / GIB:.1f} GiB")
    rows = dict(re.findall(r"^(\S.*?) +([\d.]+)(?:  |$)", "\n".join(table(plan)), re.MULTILINE))
    assert rows["sum"] == total
    assert all(rows[name] == f"{size / GIB:.1f}" for name, size in parts.items())
    assert ("too much" in verdict(plan)) == (plan.memory.total > plan.capacity)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_remedy_saves_is_the_difference_of_two_plans(seed: int):
    """Each proposed option, given on the command line, takes as much less as it promised."""
    case = drawn(100 + seed)
    name, machine, processes, fields = case
    plan = planned(case)
    cache = {"rollout.kv_cache_gib": str(plan.config.rollout.kv_cache_gib or "null")}
    for options, saved in helping(plan).items():
        words = options.split()
        pairs = zip(words[::2], words[1::2], strict=True)
        changes = {FLAGS.get(key[2:], key[2:]): value for key, value in pairs}
        more = int(changes.pop("processes", processes))
        config = loaded(name, {**fields, **cache, **changes})
        assert config is not None, options
        again = make_plan(config, SHAPES[name], "", machine, more)
        assert plan.memory.total - again.memory.total == saved, options
        assert saved > 0


LESS = {
    "smaller micro-batches": (
        {"learner__micro_batch_tokens": "10240"},
        {"learner__micro_batch_tokens": "40960"},
    ),
    "gradient checkpointing": (
        {"learner__gradient_checkpointing": "true"},
        {"learner__gradient_checkpointing": "false"},
    ),
    "16-bit masters": (
        {"learner__master_dtype": "bfloat16"},
        {"learner__master_dtype": "float32"},
    ),
    "one moment": (
        {"learner__optimizer__name": "muon"},
        {"learner__optimizer__name": "adamw"},
    ),
    "a smaller cache": ({"rollout__kv_cache_gib": "2"}, {"rollout__kv_cache_gib": "4"}),
    "no reference policy": ({"learner__kl__name": "none"}, {"learner__kl__name": "k3"}),
    "codes made anew": ({"learner__keep_codes": "false"}, {"learner__keep_codes": "true"}),
    "adapters": ({"learner__lora__name": "lora"}, {"learner__lora__name": "none"}),
}
"""What a user changes to save memory: the smaller setting, the larger one."""


@pytest.mark.parametrize("saving", LESS)
def test_what_saves_memory_never_costs_any(saving: str):
    """It also saves some of the drawn runs something: a setting without effect is caught."""
    smaller, larger = LESS[saving]
    saves = 0
    for seed in range(20):
        case = drawn(200 + seed)
        few = counted(case, **smaller)
        many = counted(case, **larger)
        if few is not None and many is not None:
            assert few.total <= many.total, case
            saves += few.total < many.total
    assert saves


@pytest.mark.parametrize("seed", range(12))
def test_more_processes_never_need_more_each(seed: int):
    """Each number of processes from two on loads the libraries for communication."""
    name, _, _, fields = drawn(300 + seed)
    totals = []
    for processes in (2, 4, 8):
        memory = counted((name, parse_machine(f"{processes}x80GB"), processes, fields))
        assert memory is not None
        totals.append(memory.total)
    assert totals == sorted(totals, reverse=True)
