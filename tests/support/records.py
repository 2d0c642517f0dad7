"""Outputs recorded as JSON beside the test that makes them, so that a change is noticed.

To record an intended change: QARL_RECORD=1 pytest -n 0 the/test_file.py
"""

import json
import math
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

LONGEST_TEXT = 90
"""Number of characters above which a text is recorded as several lines, for its reader."""


def plain(value: Any) -> Any:
    """Return the value as JSON holds it.

    Numbers are rounded to five digits, on which all machines agree. A long text is a list of lines.
    """
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return textwrap.wrap(value, LONGEST_TEXT, break_long_words=False)
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def assert_recorded(
    file: str, name: str, value: Any, within: float | tuple[float, float] = 0
) -> None:
    """Assert that `value` is the record `name` in the JSON file beside the test `file`.

    within: tolerance for the numbers of a flat mapping, relative or (relative, absolute). It is
    for numbers that depend on products, which other machines sum in another order.

    Raises `LookupError` if there is no such record.
    """
    path = Path(file).with_suffix(".json")
    value = plain(value)
    records = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("QARL_RECORD"):
        records[name] = value
        path.write_text(json.dumps(records, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    if name not in records:
        raise LookupError(
            f"{path} has no record {name!r}; QARL_RECORD=1 pytest -n 0 {file} makes one"
        )
    expected = records[name]
    if within:
        relative, absolute = within if isinstance(within, tuple) else (within, within / 100)
        expected = pytest.approx(expected, rel=relative, abs=absolute)
    assert value == expected
