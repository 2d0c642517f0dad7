r"""Answers in \boxed{…}: QaRL's verdicts are math-verify's, whatever is in the box, and none hangs
a run; the suite of benchmarks that is judged so.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from math_verify import LatexExtractionConfig, parse, verify
from pyarrow import parquet

from qarl.cli.main import main
from qarl.configs.schema.task import TaskConfig
from qarl.evaluation.suites import SUITES, suite_tasks
from qarl.tasks import Problem, Response, TaskError
from qarl.tasks.math import TIME_LIMIT, math_checker, math_scorer
from tests.support import Policies
from tests.support.profiles import thorough
from tests.support.transformers_engine import use_transformers_engine


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    """Each costs seconds of imports."""
    with pytest.MonkeyPatch.context() as patch:
        if not thorough():
            patch.setattr("qarl.tasks.math._WORKERS", 1)
        yield


Case = tuple[str, str, bool | None]
"""A reference, an answer, and whether that is right; None where mathematicians might differ:
math-verify decides.
"""


def _whole(rng: random.Random) -> Case:
    number = rng.randrange(-10_000, 10_000)
    off = rng.choice((0, 0, 1, -3))
    return (
        str(number),
        f"{number + off:,}" if rng.random() < 0.3 else str(number + off),
        not off,
    )


def _fraction(rng: random.Random) -> Case:
    top = rng.randrange(1, 40)
    bottom = rng.randrange(2, 40)
    factor = rng.randrange(1, 5)
    off = rng.choice((0, 0, 1))
    written = rng.choice((r"\frac{%d}{%d}", r"\dfrac{%d}{%d}", r"\tfrac{%d}{%d}", "%d/%d"))
    return (
        rf"\frac{{{top}}}{{{bottom}}}",
        written % (top * factor + off, bottom * factor),
        not off,
    )


def _unit(rng: random.Random) -> Case:
    number = rng.randrange(1, 500)
    off = rng.choice((0, 0, 2))
    unit = rng.choice(
        (
            r"\text{ cm}",
            r" \text{ miles}",
            r"\mathrm{ kg}",
            r"\%",
            r"^\circ",
            r"\$",
            r" \text{ units}^2",
        )
    )
    shown = f"{unit}{number + off}" if unit == r"\$" else f"{number + off}{unit}"
    return (
        str(number),
        shown,
        None if unit in (r"^\circ", r" \text{ units}^2") else not off,
    )


def _pair(rng: random.Random) -> Case:
    a, b = rng.sample(range(-20, 20), 2)
    swapped = rng.random() < 0.3
    shown = f"({b}, {a})" if swapped else rng.choice((f"({a},{b})", rf"\left({a}, {b}\right)"))
    return f"({a}, {b})", shown, not swapped


def _words(rng: random.Random) -> Case:
    days = ("Monday", "Tuesday", "Friday")
    reference = rng.choice(days)
    shown = rng.choice(days)
    return rf"\text{{{reference}}}", rf"\text{{{shown}}}", reference == shown


def _nested(rng: random.Random) -> Case:
    number = rng.randrange(1, 999)
    off = rng.choice((0, 0, 1))
    return (
        str(number),
        rng.choice((r"\boxed{%d}", "{%d}", "{{%d}}")) % (number + off),
        not off,
    )


def _digits(rng: random.Random) -> Case:
    """10 kB of them."""
    digits = "".join(rng.choices("123456789", k=10_000))
    return digits, rng.choice((digits, digits[:-1] + "0")), None


def _broken(rng: random.Random) -> Case:
    number = str(rng.randrange(1, 99))
    odd = (
        "",
        r"\frac{1}{0}",
        r"\sqrt{",
        "?",
        r"\frac{a}",
        r"\left(",
        "…",
        r"\text{}",
        "1 2 3 apples",
        "}{",
    )
    return number, rng.choice(odd), False


KINDS = (_whole, _fraction, _unit, _pair, _words, _nested, _digits, _broken)

SLOW = (
    "9^{9^{9^{9}}}",
    "99999999!",
    "10^{10^{10}}",
    r"\sum_{k=1}^{10^{10}} k",
    "{" * 3000 + "}" * 3000,
    "(1+" * 300 + "1" + ")" * 300,
    r"\sqrt{" * 60 + "2" + "}" * 60,
    "(x+1)^{500}",
    "1" * 4301 + "!" * 3,
)
"""Answers that cost a parser, or arithmetic, seconds or for ever. The reference is "1"; all are
wrong.
"""


def generated(count: int, seed: int) -> Iterator[Case]:
    r"""Return generated answers in \boxed{…}, equally many of every kind in turn, each box in a
    sentence.
    """
    rng = random.Random(seed)
    for number in range(count):
        reference, boxed, right = KINDS[number % len(KINDS)](rng)
        before = rng.choice(
            (
                "",
                "So the answer is ",
                "We add 1 and 2, and get\n\n",
                "</think> **Answer** ",
            )
        )
        yield reference, f"{before}$\\boxed{{{boxed}}}$", right


def response(reference: str, text: str) -> Response:
    return Response(Problem(reference[:20], "?", reference), text)


def by_the_library(reference: str, text: str) -> bool:
    """Ask math-verify directly with the whole text, as verl does."""
    read = [LatexExtractionConfig()]
    expected = parse(f"\\boxed{{{reference}}}", extraction_config=read, parsing_timeout=0)
    return verify(
        expected,
        parse(text, extraction_config=read, parsing_timeout=0),
        timeout_seconds=0,
    )


def test_generated_answers_agree_with_math_verify():
    """500 in `make test-thorough`. Blind spot: of several boxes in a text QaRL takes the last, the
    library all.
    """
    drawn = list(generated(500 if thorough() else 2 * len(KINDS), seed=0))
    rewards = math_scorer()([response(reference, text) for reference, text, _ in drawn])
    for (reference, text, right), reward in zip(drawn, rewards, strict=True):
        assert reward == float(by_the_library(reference, text)), (reference, text)
        assert right is None or reward == float(right), (reference, text)
    assert 0.3 < sum(reward == 1.0 for reward in rewards) / len(drawn) < 0.8


@pytest.mark.skipif(not thorough(), reason="tens of seconds; in `make test-thorough`")
def test_no_answer_hangs_a_run():
    """Contract: each answer counts as wrong at its time limit at the latest, and its neighbors are
    still judged.
    """
    around = [
        response("1", r"\boxed{1}"),
        *(response("1", rf"\boxed{{{slow}}}") for slow in SLOW),
        response("2", "2"),
    ]
    start = time.monotonic()
    assert math_scorer()(around) == [1.0] + [0.0] * (len(SLOW) + 1)
    assert time.monotonic() - start < (TIME_LIMIT + 5) * len(SLOW)


def test_a_reference_may_be_boxed_or_in_dollars_and_an_unreadable_one_gives_no_signal():
    unreadable = [response("", r"\boxed{1}")]
    assert math_scorer()(unreadable) == [None]
    assert math_checker()(unreadable) == [False]
    for reference in (r"\boxed{7}", "$7$", " 7 ", r"$\boxed{7}$"):
        assert math_checker()([response(reference, r"\boxed{7}"), response(reference, "7")]) == [
            True,
            False,
        ]


ROWS: dict[str, list[dict[str, Any]]] = {
    "aime24": [
        {
            "id": 60,
            "problem": "Find $x$ if $2x = 408$.",
            "solution": "…",
            "answer": "204",
            "year": "2024",
        },
        {
            "id": 61,
            "problem": "How many minutes?",
            "solution": "…",
            "answer": "025",
            "year": "2024",
        },
    ],
    "aime25": [{"problem": "Find the sum of all integer bases.", "answer": "70", "id": "0"}],
    "amc23": [{"id": 0, "question": "Find $a+b$.", "answer": 27.0, "url": "…"}],
    "math500": [
        {
            "problem": "Convert $(0,3)$.",
            "solution": "…",
            "subject": "Precalculus",
            "level": 2,
            "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
            "unique_id": "test/precalculus/807.json",
        }
    ],
    "minerva": [{"question": "At what energy? Answer in eV.", "answer": "13.6"}],
    "olympiadbench": [
        {
            "id": 1606,
            "question": "Find $T$.",
            "solution": ["…"],
            "final_answer": ["$\\frac{1}{2}$"],
            "is_multiple_answer": False,
            "answer_type": "Numerical",
            "context": None,
        }
    ],
}
"""A few rows as each data set has them."""
RIGHT = {
    "aime24": "204",
    "aime25": "70",
    "amc23": "27",
    "math500": "(3, \\frac{\\pi}{2})",
    "minerva": "13.6",
    "olympiadbench": "0.5",
}


def write_copies(folder: Path) -> Path:
    """A local copy of the suite: files of three kinds, what `hf download` leaves, and what
    `save_to_disk` does.
    """
    folder.mkdir(exist_ok=True)
    for name, rows in ROWS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        if name == "aime25":
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "aime25.parquet")
        elif name == "minerva":
            (folder / "minerva.csv").write_text(
                'question,answer\n"At what energy? Answer in eV.",13.6\n'
            )
        elif name == "math500":
            (folder / name).mkdir()
            (folder / name / "test.jsonl").write_text(lines)
        elif name == "olympiadbench":
            datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(
                folder / name
            )
        else:
            (folder / f"{name}.jsonl").write_text(lines)
    return folder


@pytest.mark.usefixtures("hub_cache")
def test_a_suite_is_read_from_copies_and_judged_as_mathematics(tmp_path: Path):
    tasks = suite_tasks("math", write_copies(tmp_path / "copies"), TaskConfig())
    assert list(tasks) == [benchmark.name for benchmark in SUITES["math"]] == list(RIGHT)
    for name, task in tasks.items():
        assert task.size("heldout") == len(ROWS[name])
        assert task.size("train") == 0
        problem = min(
            task.problems("heldout", 0, len(ROWS[name]), 0),
            key=lambda p: p.id,
        )
        assert "\\boxed" in problem.chat[0]["content"]
        assert problem.chat[1]["content"] == problem.question
        texts = (f"so \\boxed{{{RIGHT[name]}}}", RIGHT[name], "\\boxed{1000}")
        assert task.correct([Response(problem, text) for text in texts]) == [
            True,
            False,
            False,
        ], name
    last = max(
        tasks["aime24"].problems("heldout", 0, 2, 0),
        key=lambda p: p.id,
    )
    assert tasks["aime24"].correct([Response(last, "\\boxed{25}")]) == [True], "AIME writes 025"
    told = suite_tasks("math", tmp_path / "copies", TaskConfig(system="Be brief."))["aime25"]
    assert told.problems("heldout", 0, 1, 0)[0].chat[0] == {
        "role": "system",
        "content": "Be brief.",
    }


def test_a_suite_says_which_copies_are_missing_and_how_to_get_them(tmp_path: Path):
    (write_copies(tmp_path) / "aime25.parquet").unlink()
    (tmp_path / "amc23.jsonl").unlink()
    with pytest.raises(TaskError) as told:
        suite_tasks("math", tmp_path, TaskConfig())
    assert "lacks aime25, amc23 (a folder of that name, or a file of it: .jsonl, .csv" in str(
        told.value
    )
    assert (
        f"hf download --repo-type dataset math-ai/aime25 --local-dir {tmp_path / 'aime25'}\n"
        in str(told.value)
    )


@pytest.mark.usefixtures("hub_cache")
def test_eval_asks_a_suite(
    random_policy: Policies, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """The whole command, with an engine that only tests know: two samples, JSON, and what it is not
    compared with.
    """
    use_transformers_engine(monkeypatch)
    copies = write_copies(tmp_path / "copies")
    first = tmp_path / "first.json"
    policy = str(random_policy(True))
    asked = [
        "eval",
        policy,
        "--suite",
        "math",
        "--data",
        str(copies),
        "--problems",
        "1",
        "--task.system",
        "Be brief.",
        "--max-new-tokens",
        "4",
        "--max-prompt-tokens",
        "256",
        "--samples",
        "2",
        "--temperature",
        "1",
    ]
    assert main([*asked, "--json", str(first)]) == 0
    out = capsys.readouterr().out
    assert "aime24, 2 samples at 1: 0.0% of 1 held-out problems; pass@2 0.0%; maj@2 0.0%; " in out
    assert "mean of 6 benchmarks: 0.0%\n" in out
    tree = json.loads(first.read_text())
    assert [b["name"] for b in tree["benchmarks"]] == list(RIGHT)
    assert tree["settings"]["temperature"] == 1
    assert len(tree["benchmarks"][0]["questions"][0]["answers"]) == 2
    assert main([*asked, "--seed", "1", "--against", str(first)]) == 2
    assert "is asked with seed 1" in capsys.readouterr().err
