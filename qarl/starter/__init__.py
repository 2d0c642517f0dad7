"""What `qarl init` writes: questions, a reward and a configuration to start from, which train as
they are.
"""

import json
import random
from importlib.resources import files
from pathlib import Path

_QUESTIONS, _HELDOUT = 2560, 256
FILES = ("questions.jsonl", "reward.py", "run.yaml")


def write_starter(folder: Path, configuration: str | None = None) -> None:
    """Make `folder` with `FILES`, the same ones every time. configuration: another run.yaml."""
    folder.mkdir(parents=True)
    for name in FILES[1:]:
        (folder / name).write_text(
            (files(__name__) / name).read_text(encoding="utf-8"), encoding="utf-8"
        )
    if configuration is not None:
        (folder / FILES[2]).write_text(configuration, encoding="utf-8")
    (folder / FILES[0]).write_text(
        "".join(json.dumps(line) + "\n" for line in _questions()), encoding="utf-8"
    )


def _questions() -> list[dict[str, object]]:
    """Sums of two numbers of two digits, as the embedded policy was warmed up on."""
    pairs = random.Random(0).sample(
        [(a, b) for a in range(10, 100) for b in range(10, 100)], _QUESTIONS
    )
    opening = "State the final answer to the following arithmetic problem"
    return [
        {
            "question": f"{opening}: {a} + {b} =",
            "answer": str(a + b),
            "split": "heldout" if number < _HELDOUT else "train",
            "tolerance": 1,
        }
        for number, (a, b) in enumerate(pairs)
    ]
