"""Tables of cases, in the JSON file beside a test's: a case a line."""

import json
import re
from pathlib import Path
from typing import Any


def cases(test: str, name: str) -> Any:
    """The table of that name. test: the test's `__file__`."""
    return json.loads(Path(test).with_suffix(".json").read_text())[name]


def pattern(words: str) -> str:
    """For `match=`: these words as they are, where … stands for whatever is between them."""
    return ".*".join(map(re.escape, words.split("…")))
