"""Outputs kept as JSON beside the test that makes them, so that a change of them is seen.

Record anew, where a change is meant: QARL_RECORD=1 pytest -n 0 the/test_file.py
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest


def plain(value: Any) -> Any:
    """As JSON holds it; numbers to five digits, which every machine agrees on."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def assert_recorded(
    file: str, name: str, value: Any, within: float | tuple[float, float] = 0
) -> None:
    """That `value` is what was recorded under `name` beside the test file. within: relative, and
    absolute, of a flat mapping's numbers, which products decide that other machines sum otherwise.
    """
    record = Path(file).with_suffix(".json")
    value = plain(value)
    kept = json.loads(record.read_text()) if record.exists() else {}
    if os.environ.get("QARL_RECORD"):
        kept[name] = value
        lines = (
            f"{json.dumps(key)}: {json.dumps(kept[key], ensure_ascii=False)}"
            for key in sorted(kept)
        )
        record.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    relative, absolute = within if isinstance(within, tuple) else (within, within / 100)
    assert value == (
        pytest.approx(kept.get(name), rel=relative, abs=absolute) if within else kept.get(name)
    )
