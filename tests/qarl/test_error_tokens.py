"""Error tokens by hand-counted cases, and loops against the definition taken word by word."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qarl.report.error_tokens import (
    IMPROBABLE,
    LONGEST_PERIOD,
    REPEATS,
    count_error_tokens,
    repeated_tokens,
)
from qarl.rollout.types import Completion, Group, Prompt

ROOT = Path(__file__).parents[2]
SURE = math.log(0.5)
DOUBTFUL = math.log(IMPROBABLE / 2)


def completion(tokens: list[int], improbable: tuple[int, ...] = ()) -> Completion:
    logprobs = tuple(DOUBTFUL if i in improbable else SURE for i in range(len(tokens)))
    return Completion(tuple(tokens), logprobs, "", 0, "stop")


def group(*pairs: tuple[Completion, float]) -> Group:
    return Group(
        Prompt("0", "", (1,)),
        tuple(c for c, _ in pairs),
        tuple(r for _, r in pairs),
    )


LOOPS = {
    "three times are none": ([5, 5, 5], "..."),
    "the broken-off fifth round is in the loop": ([9, *[1, 2] * 4, 1, 7], ".xxxxxxxxx."),
    "of eight": ([1, 2, 3, 4, 5, 6, 7, 8] * 4, "x" * 32),
    "nothing": ([], ""),
}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    LOOPS.values(),
    ids=LOOPS,
)
def test_repeated_tokens_of_short_sequences(tokens: list[int], expected: str):
    assert "".join("x" if hit else "." for hit in repeated_tokens([tokens])) == expected


def test_shares_and_their_split_by_advantage():
    """Eight tokens: a loop of four in the worse answer, one of them improbable too; one improbable
    in the better. Equal rewards have no sign: 0.1 three times has a mean that is not 0.1 in
    floating point.
    """
    worse = completion([5, 5, 5, 5], (1,))
    better = completion([1, 2, 3, 4], (0,))
    assert count_error_tokens([group((worse, 0.0), (better, 1.0))]) == {
        "error_tokens": 5 / 8,
        "improbable_tokens": 2 / 8,
        "repeated_tokens": 4 / 8,
        "error_tokens_negative": 1.0,
        "error_tokens_positive": 1 / 4,
    }
    even = count_error_tokens([group(*[(completion([1, 2]), 0.1)] * 3)])
    assert even["error_tokens"] == 0.0
    assert even["error_tokens_negative"] is None
    assert even["error_tokens_positive"] is None


def test_a_token_of_exactly_the_bound_is_probable():
    bound = Completion(
        (1, 2),
        (math.log(IMPROBABLE), math.log(IMPROBABLE) - 1e-9),
        "",
        0,
        "stop",
    )
    assert count_error_tokens([group((bound, 0.0), (bound, 1.0))])["improbable_tokens"] == 0.5


def by_definition(tokens: list[int]) -> list[bool]:
    """Mark every stretch that is one n-gram `REPEATS` times, and what follows as long as it goes on
    repeating.
    """
    hit = [False] * len(tokens)
    for period in range(1, LONGEST_PERIOD + 1):
        for start in range(len(tokens) - REPEATS * period + 1):
            if tokens[start : start + REPEATS * period] == tokens[start : start + period] * REPEATS:
                end = start + REPEATS * period
                while end < len(tokens) and tokens[end] == tokens[end - period]:
                    end += 1
                hit[start:end] = [True] * (end - start)
    return hit


LOOPY = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=9), st.integers(1, 5)).map(
        lambda p: p[0] * p[1]
    ),
    max_size=3,
).map(lambda parts: [token for part in parts for token in part])


@given(st.lists(LOOPY, min_size=1, max_size=4))
def test_loops_are_those_of_the_definition_sequence_by_sequence(
    sequences: list[list[int]],
):
    """Many sequences at once give what each gives alone: equal tails and heads of neighbours do not
    join.
    """
    expected = [hit for sequence in sequences for hit in by_definition(sequence)]
    assert repeated_tokens(sequences).tolist() == expected


COUNTED = [token for count in range(100, 120) for token in (5, 6, count)]
CHANGED_PERIOD = [token for period in (3, 4, 5, 6) for token in range(1, period + 1)]
BLIND: dict[str, tuple[list[int], bool]] = {
    "a phrase of nine tokens, over and over": ([*range(9)] * 10, True),
    "a phrase three times": ([1, 2, 3] * 3, True),
    "a list that counts on": (COUNTED, True),
    "a loop that changes its period": (CHANGED_PERIOD, True),
    "fluent nonsense": ([*range(40)], True),
    "a drawn line": ([7] * 30, False),
    "ha ha ha ha": ([8] * 4, False),
    "a column of zeros": ([3, 9] * 12, False),
}
"""Case of the laboratory's page → its tokens, and whether they are an error."""


@pytest.mark.parametrize("case", BLIND)
def test_known_misses_and_false_alarms_of_loops(case: str):
    """Contract: these are the misses and false alarms that docs/lab/experiments.md lists, for every
    token.
    """
    tokens, wrong = BLIND[case]
    assert repeated_tokens([tokens]).tolist() == [not wrong] * len(tokens)
    assert case in (ROOT / "docs/lab/experiments.md").read_text()
