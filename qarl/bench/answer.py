"""What a worker's process answers: one marked line of JSON among what libraries print. Imports nothing heavy."""

import dataclasses
import json
from typing import Any

_MARK = "QARL-ANSWER "


def answer_line(answer: Any) -> str:
    """answer: a dataclass of what JSON holds."""
    return f"\n{_MARK}{json.dumps(dataclasses.asdict(answer))}\n"


def last_answer(output: str) -> Any:
    """The last answer's JSON in a worker's output; None without one."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1].removeprefix(_MARK)) if lines else None
