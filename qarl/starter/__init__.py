"""Files that `qarl init` writes to start from: questions, a reward and a configuration. They train
as they are.
"""

import json
import random
from importlib.resources import files
from pathlib import Path

_QUESTIONS = 2560
"""Number of questions."""
_HELDOUT = 256
"""Number of held-out questions among them."""
FILES = ("questions.jsonl", "reward.py", "run.yaml")
"""Names of the files."""


def write_starter(folder: Path, configuration: str | None = None) -> None:
    """Create `folder` with `FILES`, the same ones every time.

    configuration: text of run.yaml. Default: the shipped one.
    """
    folder.mkdir(parents=True)
    questions, *shipped = FILES
    for name in shipped:
        text = (files(__name__) / name).read_text(encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-8")
    if configuration is not None:
        (folder / "run.yaml").write_text(configuration, encoding="utf-8")
    lines = "".join(json.dumps(line) + "\n" for line in _questions())
    (folder / questions).write_text(lines, encoding="utf-8")


def _questions() -> list[dict[str, object]]:
    """Return sums of two-digit numbers, like those that the embedded policy was warmed up on."""
    all_pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    pairs = random.Random(0).sample(all_pairs, _QUESTIONS)
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
