"""Tables of cases, one case per line, in the JSON file beside a test file."""

import json
import re
from pathlib import Path
from typing import Any


def cases(test: str, name: str) -> Any:
    """Return the table `name` from the JSON file beside `test`, which is the test's `__file__`."""
    return json.loads(Path(test).with_suffix(".json").read_text())[name]


def pattern(words: str) -> str:
    """Return a regular expression for `match=` that has these words literally.

    Each … stands for any text between them.
    """
    return ".*".join(map(re.escape, words.split("…")))
