"""What trains the policy, and what accuracy counts. Change either; `qarl check run.yaml` shows what
they say.
"""


def reward(problem, text: str) -> float:
    """A number for one completion; only differences between completions of one problem teach.

    problem: .question, .answer, and .metadata with the other keys of its line. text: without
    special tokens. None is no signal: the completion is left out.
    """
    try:
        off = abs(int(text.strip()) - int(problem.answer))
    except ValueError:
        return 0.0
    return 1.0 if off == 0 else 0.5 * (off <= problem.metadata.get("tolerance", 0))


def correct(problem, text: str) -> bool:
    """Whether a completion is right; partial credit is not."""
    return text.strip() == problem.answer
