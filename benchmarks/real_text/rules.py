"""Write questions that each set a rule for the form of their answer, for docs/lab/real.md.

python -m benchmarks.real_text.rules FILE.jsonl

The 40 subjects times the 8 rules of the task `follow_rule` are 320 questions; every second, in an
order shuffled once, is held out. `rewards.obeys_rule` checks the rules.
"""

import json
import random
import sys
from pathlib import Path

from qarl.tasks.follow_rule import RULES, SUBJECTS


def questions() -> list[dict[str, str]]:
    """Return the rows: question, answer (the rule's value), rule, and split.

    Each rule has the first of its values.
    """
    rows = [
        {
            "question": f"Say something about {subject}. {sentence.format(values[0])}",
            "answer": values[0],
            "rule": rule,
        }
        for subject in SUBJECTS
        for rule, (sentence, values) in RULES.items()
    ]
    random.Random(0).shuffle(rows)
    return [{**row, "split": "heldout" if n % 2 else "train"} for n, row in enumerate(rows)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(row)}\n" for row in questions()))
