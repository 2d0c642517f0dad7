"""A reward with partial credit: 1 for the answer, 0.5 within the line's own `tolerance`, else 0."""


def reward(problem, text: str) -> float:
    """Return the reward of one completion.

    problem: has .question, .answer, and .metadata with the other keys of its line. text: the
    completion without special tokens.
    """
    try:
        off = abs(int(text.strip()) - int(problem.answer))
    except ValueError:
        return 0.0
    return 1.0 if off == 0 else 0.5 * (off <= problem.metadata.get("tolerance", 0))
