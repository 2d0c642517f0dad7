"""Write pairs of a question and its right answer, for the short answers of docs/lab/real.md.

python -m benchmarks.real_text.short_answers PAIRS.jsonl

The questions are sums of two numbers of two digits and lists of words to reverse, in turn. They
are training questions of their own seed, so that reinforcement meets others. `qarl sft` learns from
them: without it the model in four bits gives no right answer to reinforce.
"""

import json
import sys
from pathlib import Path

from qarl.tasks.procedural import ReasoningGymTask

PAIRS_PER_TASK = 768
SEED = 1
TASKS = (
    ReasoningGymTask(
        "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    ),
    ReasoningGymTask("word_sequence_reversal", {"min_words": 3, "max_words": 5}),
)


def main(pairs: Path) -> None:
    """Write one JSON object a pair to `pairs`."""
    problems = [task.problems("train", 0, PAIRS_PER_TASK, SEED) for task in TASKS]
    with pairs.open("w") as file:
        for same_index in zip(*problems, strict=True):
            for problem in same_index:
                pair = {"question": problem.question, "answer": problem.answer, "split": "train"}
                file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
