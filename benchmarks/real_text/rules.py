"""Write questions that each set a rule for the form of their answer, for docs/lab/real.md.

python -m benchmarks.real_text.rules FILE.jsonl

40 subjects times 8 rules are 320 questions; every second, in an order shuffled once, is held out.
`rewards.obeys_rule` checks the rules.
"""

import json
import random
import sys
from pathlib import Path

SUBJECTS = [
    "owls",
    "snow",
    "bakeries",
    "the violin",
    "rivers",
    "clouds",
    "ants",
    "candles",
    "the moon",
    "islands",
    "ferries",
    "pepper",
    "wool",
    "castles",
    "storms",
    "roses",
    "mushrooms",
    "pianos",
    "camels",
    "harbours",
    "silk",
    "thunder",
    "wells",
    "sparrows",
    "honey",
    "railways",
    "ice",
    "attics",
    "meadows",
    "sand",
    "lanterns",
    "orchards",
    "whales",
    "mountains",
    "ink",
    "tides",
    "bells",
    "olives",
    "foxes",
    "the sun",
]

RULES = [
    ("lowercase", "-", "Use lowercase letters only."),
    ("uppercase", "-", "WRITE IN CAPITAL LETTERS ONLY."),
    ("words", "6", "Use exactly six words."),
    ("first", "perhaps", "Start with the word Perhaps."),
    ("last", "always", "Let the last word be always."),
    ("without", "the", "Avoid the letters t-h-e in a row."),
    ("question", "-", "Write one question and nothing else."),
    ("lines", "2", "Write exactly two lines."),
]
"""Name of the rule in `rewards.obeys_rule`, its value in that function, and its sentence."""


def questions() -> list[dict[str, str]]:
    """Return the rows: question, answer (the rule's value), rule, and split."""
    rows = [
        {
            "question": f"Say something about {subject}. {sentence}",
            "answer": value,
            "rule": rule,
        }
        for subject in SUBJECTS
        for rule, value, sentence in RULES
    ]
    random.Random(0).shuffle(rows)
    return [{**row, "split": "heldout" if n % 2 else "train"} for n, row in enumerate(rows)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(row)}\n" for row in questions()))
