"""The reward that trains the policy, and the verdict that accuracy counts. Change either;
`qarl check run.yaml` shows what they return.
"""


def reward(problem, text: str) -> float:
    """Return the reward of one completion; only differences between completions of a problem teach.

    problem: has .question, .answer, and .metadata with the other keys of its line. text: the
    completion without special tokens. Return None for no signal: the completion is left out.
    """
    try:
        off = abs(int(text.strip()) - int(problem.answer))
    except ValueError:
        return 0.0
    return 1.0 if off == 0 else 0.5 * (off <= problem.metadata.get("tolerance", 0))


def correct(problem, text: str) -> bool:
    """Return whether a completion is right; partial credit does not count."""
    return text.strip() == problem.answer
