"""What configurations may hold, kept: every field's default and range, every scheme's codes and
bytes. A change of them changes what people's files mean.

Record anew, where a change is meant: tests/support/records.py.
"""

import dataclasses
from typing import Any

import pytest

from qarl.configs import errors
from qarl.configs.load import load_config
from qarl.configs.schema.base import pattern_fault
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import SCHEME_SPECS
from qarl.configs.words import few, quoted, sized
from tests.support.records import assert_recorded

WORDS = ("description", "title")
SHAPES = ((256, 512), (256, 96), (64, 1000), (48, 128))


def ranges(schema: Any) -> Any:
    """A JSON schema without what only people read."""
    if isinstance(schema, dict):
        return {
            key: ranges(value)
            for key, value in schema.items()
            if key not in WORDS or isinstance(value, dict)
        }
    return [ranges(item) for item in schema] if isinstance(schema, list) else schema


def test_fields_have_their_defaults_and_ranges():
    assert_recorded(__file__, "fields", ranges(RunConfig.model_json_schema()))
    config = load_config(None, {})
    assert_recorded(__file__, "without a file", config.model_dump(mode="json"))
    assert (
        config.rollout.longest == config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    )


@pytest.mark.parametrize("name", SCHEME_SPECS)
def test_schemes_have_their_codes_and_bytes(name: str):
    spec = SCHEME_SPECS[name]
    sizes = [
        (spec.fits(shape), spec.weight_bytes(shape, 2), spec.weight_bytes(shape, 4))
        for shape in SHAPES
    ]
    assert_recorded(__file__, name, [dataclasses.asdict(spec), sizes, spec.input_bytes(2)])


def test_errors_end_commands_by_their_kind():
    kinds = {kind: kind for kind in vars(errors).values() if isinstance(kind, type)}
    rows = {
        kind.__name__: [kind.heading, kind.exit_status]
        for kind in kinds
        if issubclass(kind, errors.QarlError)
    }
    assert_recorded(__file__, "errors", rows)


def test_a_long_value_is_quoted_in_eighty_characters():
    assert quoted("x" * 78) == f"'{'x' * 78}'"
    assert quoted("x" * 79) == f"'{'x' * 78}…"
    assert len(quoted("x" * 79)) == 80


def test_what_is_just_allowed():
    load_config(
        None,
        {
            "steps": "5",
            "learner.optimizer.warmup_steps": "5",
            "learner.mini_batches": "8",
            "rollout.prompts": "8",
        },
    )


def test_counts_and_sizes_in_words():
    assert [few("abcde"[:n]) for n in (3, 4, 5)] == [
        "a, b, c",
        "a, b, c and 1 more",
        "a, b, c and 2 more",
    ]
    assert [sized(n) for n in (2**30 - 2**20, 2**30, 3 * 2**29)] == [
        "1023.00 MiB",
        "1.00 GiB",
        "1.50 GiB",
    ]
    assert pattern_fault("first:1") is None
    assert "decoder layers with '0'" in f"{pattern_fault('last:0')}"
