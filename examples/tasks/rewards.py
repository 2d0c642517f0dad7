"""Rewards in every signature that QaRL accepts (docs/guide/tasks.md).

To train the embedded policy with them, run one of these in this folder:

    qarl train --task chat.jsonl --task.prompt messages --reward rewards.py:trl_format \\
        --steps 2 --eval.problems 2
    qarl train --task questions.csv --reward rewards.py:compute_score --steps 2 --eval.problems 2
    qarl train --task questions.csv --reward rewards.py:right=1,rewards.py:short=0.1 \\
        --steps 2 --eval.problems 2
"""

import re


def trl_format(completions, **kwargs):
    """Return 1 for each chat completion that has the requested format, else 0.

    The function is the one in TRL's documentation of custom reward functions.
    """
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def trl_boxed(completions, ground_truth, **kwargs):
    r"""Return 1 for each completion whose \boxed{} contains the reference answer, else 0.

    The function is the one in TRL's documentation. It takes prompts that are text.
    """
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [
        1.0 if content == truth else 0.0
        for content, truth in zip(contents, ground_truth, strict=True)
    ]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score in a mapping; a number is accepted too. The signature is verl's."""
    return {"score": float(solution_str.strip() == ground_truth), "from": data_source}


def right(problem, text: str) -> float | None:
    """Return 1 for the right answer, else 0, and None (no signal) for an empty completion.

    The signature is QaRL's.
    """
    return float(text.strip() == problem.answer) if text.strip() else None


async def short(problem, text: str, token_ids) -> float:
    """Return minus the number of the completion's tokens.

    The function is async, like a reward that asks a server.
    """
    return -float(len(token_ids))
