"""Write pairs of a question and an answer that the unquantized model gives, for docs/lab/real.md.

python -m benchmarks.real_text.pairs RULES.jsonl PAIRS.jsonl

RULES.jsonl is what `rules.py` writes. Every training question gets `SAMPLES` answers, drawn at
temperature 1 from SmolLM2-135M-Instruct in bf16. Answers cut off at `MAX_NEW_TOKENS` are left out,
because fine-tuning would teach to end there. No answer is checked against its rule.
"""

import json
import sys
from pathlib import Path

import qarl

SAMPLES = 8
MAX_NEW_TOKENS = 96


def main(rules: Path, pairs: Path) -> None:
    """Read the questions of `rules` and write one JSON object an answer to `pairs`."""
    rows = [json.loads(line) for line in rules.read_text().splitlines()]
    questions = [row["question"] for row in rows if row["split"] == "train"]
    policy = qarl.align("smollm2-135m", "bf16")
    with qarl.engine(
        policy, max_prompt_tokens=64, max_new_tokens=MAX_NEW_TOKENS, max_num_seqs=128
    ) as engine:
        answers = engine.generate(questions, samples=SAMPLES, seed=0)
    with pairs.open("w") as file:
        for question, completions in zip(questions, answers, strict=True):
            for completion in completions:
                if not completion.truncated:
                    pair = {"question": question, "answer": completion.text, "split": "train"}
                    file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
