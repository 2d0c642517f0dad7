"""Results of answers: closed forms, and pairs of checkpoints. Suites are
tests/qarl/test_math.py's.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qarl.cli.eval import _compared
from qarl.cli.main import main
from qarl.cli.options import write_json
from qarl.evaluation import results
from qarl.evaluation.results import (
    Evaluation,
    EvaluationError,
    Question,
    Result,
    differences,
    final_answer,
    majority,
)
from qarl.evaluation.statistics import estimate, estimate_of_means
from tests.support import Policies
from tests.support.transformers_engine import use_transformers_engine


def result(*verdicts: str, name: str = "made up") -> Result:
    """Questions answered as "101" says, right and wrong; each right answer is "r", the wrong ones
    all differ.
    """
    questions = tuple(
        Question(
            id=f"{name}:{number}",
            question=f"question {number}",
            reference="r",
            answers=tuple("r" if mark == "1" else f"w{k}" for k, mark in enumerate(marks)),
            correct=tuple(mark == "1" for mark in marks),
            tokens=(7,) * len(marks),
            truncated=(False,) * len(marks),
        )
        for number, marks in enumerate(verdicts)
    )
    return Result(name, questions)


def evaluation(*each: Result, **settings: Any) -> Evaluation:
    return Evaluation(
        target="runs/one",
        dtype="bfloat16",
        settings={"seed": 0, **settings},
        results=each,
    )


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int, c: int):
    for k in range(1, n + 1):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert results.pass_at(k, n, c) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_majority_by_hand():
    assert majority(["a", "b", "a"], [False, True, False]) == 0.0
    assert (
        majority(["a", "b", "b", None, None, None], [False, True, True, False, False, False]) == 1.0
    )
    assert majority(["a", "b", "c"], [True, False, False]) == pytest.approx(1 / 3), (
        "what ties shares it"
    )
    assert majority([None, None], [False, False]) == 0.0
    assert final_answer("so \\boxed{7}.") == final_answer(" 7\n") == "7"
    assert final_answer("x" * 2000) is None


def test_figures_by_hand():
    found = result("1100", "0000", "1111", "1000")
    assert found.accuracy == 7 / 16
    assert found.average().mean == pytest.approx(7 / 16)
    passes = found.passes()
    assert list(passes) == [1, 2, 4]
    assert passes[1].mean == pytest.approx(7 / 16)
    assert passes[4].mean == 0.75
    assert passes[2].mean == pytest.approx(np.mean([1 - 1 / 6, 0, 1, 1 / 2]))
    assert found.majority().mean == pytest.approx((1 + 0 + 1 + 1 / 4) / 4)
    assert list(result("101").passes()) == [1, 2, 3]


def test_intervals_are_those_of_the_closed_form():
    """The standard error of a share p of N questions is √(p(1-p)/N); of a mean of benchmarks, half
    the root of their sum. A question's own samples do not narrow it as further questions would.
    """
    half = [1.0, 0.0] * 200
    for found, error in (
        (estimate(half), math.sqrt(0.25 / 400)),
        (estimate_of_means([half, half[:100]]), math.sqrt(0.25 / 400 + 0.25 / 100) / 2),
        # drawn apart: of one seed it is √(0.25/400)
        (estimate_of_means([half] * 4), math.sqrt(0.25 / 1600)),
    ):
        assert found.mean == 0.5
        assert [found.low, found.high] == pytest.approx(
            [0.5 - 1.96 * error, 0.5 + 1.96 * error], abs=0.005
        )
    assert estimate(half * 16).high == pytest.approx(0.5 + 1.96 * math.sqrt(0.25 / 6400), abs=0.002)
    # 0 of 8: Jeffreys' upper end; a difference that is always 0 has no width
    for share in (0.0, 1.0):
        found = estimate([share] * 8, shares=True)
        far = found.high if share == 0 else 1 - found.low
        assert far == pytest.approx(0.262, abs=0.01)
        assert found.mean == share
        assert share in (found.low, found.high)
        assert estimate([share] * 8).low == estimate([share] * 8).high == share
    assert estimate(half, shares=True) == estimate(half), (
        "a share that varies is drawn again as any values are"
    )
    assert estimate([0.5]).mean == 0.5
    assert math.isnan(estimate([0.5]).low)


def test_pairs_are_of_the_same_questions_asked_alike():
    own, other = (evaluation(result(*marks)) for marks in (("11", "10", "00"), ("10", "10", "01")))
    assert differences(own, other) == {"made up": [0.5, 0.0, -0.5]}
    turned = evaluation(
        dataclasses.replace(other.results[0], questions=other.results[0].questions[::-1])
    )
    assert differences(own, turned) == differences(own, other), "by question, not by place"
    once = result("11", "00")
    twice = evaluation(dataclasses.replace(once, questions=(once.questions[0], *once.questions)))
    assert differences(twice, twice) == {"made up": [0.0, 0.0, 0.0]}, (
        "a question asked twice is two"
    )
    two = [evaluation(*each.results, result("11", "00", name="second")) for each in (own, other)]
    lines = [line.partition(":")[0] for line in _compared(two[0], two[1])]
    assert lines == ["made up", "second", "mean of 2 benchmarks"]
    assert len([*_compared(own, other)]) == 1
    for wrong, said in (
        (
            evaluation(result("11", "10")),
            "not asked the same questions: one alone has 'question 2'",
        ),
        (
            evaluation(result("11", "10", "00", name="other")),
            "was asked made up, 'runs/one' other",
        ),
        (
            evaluation(result("11", "10", "00"), seed=1),
            "is asked with seed 0, 'runs/one' was with 1",
        ),
    ):
        with pytest.raises(EvaluationError, match=said):
            differences(own, wrong)


def test_an_evaluation_is_read_back(tmp_path: Path):
    written = evaluation(result("11", "10"), result("0", name="alone"))
    write_json(str(tmp_path / "e.json"), results.write_evaluation(written))
    assert results.read_evaluation(tmp_path / "e.json") == written
    for text in ("[]", "{", '{"benchmarks": []}', '{"benchmarks": [{"name": "a"}]}'):
        (tmp_path / "e.json").write_text(text)
        with pytest.raises(EvaluationError, match=r"is nothing that `qarl eval --json` wrote"):
            results.read_evaluation(tmp_path / "e.json")


def test_a_file_is_asked_each_question_once(
    random_policy: Policies, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    use_transformers_engine(monkeypatch)
    rows = [{"question": f"{k} + 1 =", "answer": str(k + 1), "split": "heldout"} for k in range(3)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        main(
            [
                "eval",
                str(random_policy(True)),
                "--task",
                "q.jsonl",
                "--max-new-tokens",
                "2",
            ]
        )
        == 0
    )
    assert (
        "q.jsonl, greedy: 0.0% [0.0, 53.6] of 3 held-out problems; 2 tokens an answer"
        in capsys.readouterr().out
    )
