"""Rewards in every signature QaRL takes (docs/guide/tasks.md). On the embedded policy, from this
folder:

qarl train --task chat.jsonl --task.prompt messages --reward rewards.py:trl_format --steps 2
--eval.problems 2 qarl train --task questions.csv --reward rewards.py:compute_score --steps 2
--eval.problems 2 qarl train --task questions.csv --reward rewards.py:right=1,rewards.py:short=0.1
--steps 2 --eval.problems 2
"""

import re


def trl_format(completions, **kwargs):
    """As in TRL's documentation of custom reward functions: does a chat's completion have the
    format asked for?
    """
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def trl_boxed(completions, ground_truth, **kwargs):
    r"""As in TRL's documentation: is what \boxed{} holds the reference answer? On prompts that are
    text.
    """
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [
        1.0 if content == truth else 0.0
        for content, truth in zip(contents, ground_truth, strict=True)
    ]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature: a number, or a mapping with the score."""
    return {"score": float(solution_str.strip() == ground_truth), "from": data_source}


def right(problem, text: str) -> float | None:
    """QaRL's signature; an empty completion says nothing about the policy."""
    return float(text.strip() == problem.answer) if text.strip() else None


async def short(problem, text: str, token_ids) -> float:
    """Async, as one that asks a server would be; with the completion's tokens."""
    return -float(len(token_ids))
