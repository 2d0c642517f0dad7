r"""Answers in \boxed{…}: QaRL's verdicts are math-verify's, whatever is in the box, and none hangs a run."""

import time
from collections.abc import Iterator

import pytest
from math_verify import LatexExtractionConfig, parse, verify

from qarl.tasks import Problem, Response
from qarl.tasks.math import TIME_LIMIT, math_checker, math_scorer
from qarl.tasks.workers import Workers
from tests.support.math_cases import KINDS, SLOW, cases
from tests.support.profiles import thorough


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    """Each costs seconds of imports."""
    with pytest.MonkeyPatch.context() as patch:
        if not thorough():
            patch.setattr("qarl.tasks.math._WORKERS", 1)
        yield


def response(reference: str, text: str) -> Response:
    return Response(Problem(reference[:20], "?", reference), text)


def by_the_library(reference: str, text: str) -> bool:
    """math-verify asked directly, with the whole text, as verl asks it."""
    read = [LatexExtractionConfig()]
    expected = parse(f"\\boxed{{{reference}}}", extraction_config=read, parsing_timeout=0)
    return verify(expected, parse(text, extraction_config=read, parsing_timeout=0), timeout_seconds=0)


def test_generated_answers_agree_with_math_verify():
    """500 of them in `make test-thorough`. Blind spot: with several boxes in a text QaRL takes the last, the library
    all."""
    made = cases(500 if thorough() else 2 * len(KINDS), seed=0)
    found = math_scorer()([response(case.reference, case.text) for case in made])
    for case, reward in zip(made, found, strict=True):
        assert reward == float(by_the_library(case.reference, case.text)), case
        assert case.right is None or reward == float(case.right), case
    assert 0.3 < sum(reward == 1.0 for reward in found) / len(made) < 0.8


@pytest.mark.skipif(not thorough(), reason="tens of seconds; in `make test-thorough`")
def test_no_answer_hangs_a_run():
    """Each is wrong, after its limit at the latest; the answers around them are judged."""
    around = [response("1", r"\boxed{1}"), *(response("1", rf"\boxed{{{slow}}}") for slow in SLOW), response("2", "2")]
    start = time.monotonic()
    assert math_scorer()(around) == [1.0] + [0.0] * (len(SLOW) + 1)
    assert time.monotonic() - start < (TIME_LIMIT + 5) * len(SLOW)


@pytest.mark.skipif(not thorough(), reason="seconds for another worker; in `make test-thorough`")
def test_what_math_verify_does_not_stop_is_stopped_from_outside(monkeypatch: pytest.MonkeyPatch):
    """With limits of a tenth of a second nothing is done in time but what comes from a warm process."""
    from qarl.tasks import math

    workers = Workers(math.job(time_limit=0.5), goes_on=True)
    monkeypatch.setattr(math, "_pool", lambda: workers)
    assert math_scorer()([response("1", r"\boxed{9^{9^{9^{9}}}}"), response("1", r"\boxed{99999999!}")]) == [0.0, 0.0]


def test_a_reference_that_cannot_be_read_gives_no_signal():
    unreadable = [response("", r"\boxed{1}")]
    assert math_scorer()(unreadable) == [None] and math_checker()(unreadable) == [False]


def test_references_may_come_in_a_box_or_between_dollars():
    for reference in (r"\boxed{7}", "$7$", " 7 ", r"$\boxed{7}$"):
        assert math_checker()([response(reference, r"\boxed{7}"), response(reference, "7")]) == [True, False]
