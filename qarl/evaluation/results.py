"""Answers to questions, and their figures: avg@n, pass@k, maj@n, and differences between two
checkpoints.

Axes: n answers to each question, c of them right.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from qarl.configs.errors import InputError
from qarl.configs.words import quoted
from qarl.evaluation.statistics import Estimate, estimate, estimate_of_means
from qarl.tasks.rewards import last_box

LONGEST_ANSWER = 1000
"""Upper bound on the characters of a completion that votes as an answer without a box."""


class EvaluationError(InputError, heading="evaluation"):
    """Raised for results that cannot be read or compared."""


@dataclass(frozen=True)
class Question:
    """One question and its answers."""

    id: str
    question: str
    reference: str
    """The right answer."""
    answers: tuple[str | None, ...]
    """Final answer of each completion (`final_answer`)."""
    correct: tuple[bool, ...]
    """Verdict on each answer."""
    tokens: tuple[int, ...]
    """Number of tokens of each completion."""
    truncated: tuple[bool, ...]
    """True for each completion that was cut off at the limit."""


@dataclass(frozen=True)
class Result:
    """A benchmark's questions, each answered equally often."""

    name: str
    questions: tuple[Question, ...]
    reward: float | None = None
    """Mean reward, see `Heldout.reward`."""

    @property
    def samples(self) -> int:
        """Number of answers to each question."""
        return len(self.questions[0].correct)

    @property
    def accuracy(self) -> float:
        """avg@n: the fraction of right answers, in [0, 1]."""
        answers = len(self.questions) * self.samples
        return sum(sum(q.correct) for q in self.questions) / answers

    def average(self) -> Estimate:
        """Return avg@n with its interval over questions."""
        return estimate(self.shares(), shares=True)

    def shares(self) -> list[float]:
        """Return the fraction of right answers to each question."""
        return [sum(q.correct) / len(q.correct) for q in self.questions]

    def passes(self) -> dict[int, Estimate]:
        """Return pass@k for k = 1, 2, 4, … and n."""
        powers = {2**i for i in range(self.samples.bit_length())}
        estimates = {}
        for k in sorted(powers | {self.samples}):
            chances = [pass_at(k, len(q.correct), sum(q.correct)) for q in self.questions]
            estimates[k] = estimate(chances, shares=True)
        return estimates

    def majority(self) -> Estimate:
        """Return maj@n with its interval over questions."""
        return estimate([majority(q.answers, q.correct) for q in self.questions], shares=True)

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a completion."""
        return self._mean([q.tokens for q in self.questions])

    @property
    def truncated(self) -> float:
        """Fraction of completions that were cut off."""
        return self._mean([q.truncated for q in self.questions])

    def _mean(self, values: Sequence[Sequence[float]]) -> float:
        return sum(map(sum, values)) / (len(self.questions) * self.samples)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a checkpoint on one benchmark or several."""

    target: str
    """The checkpoint as the user named it."""
    dtype: str
    """Compute dtype."""
    settings: dict[str, Any]
    """Settings of the questions: seed, limits, samples, temperature, …, by field name."""
    results: tuple[Result, ...]

    def mean(self) -> Estimate:
        """Return the unweighted mean of the benchmarks' avg@n."""
        return estimate_of_means([result.shares() for result in self.results], shares=True)


def final_answer(text: str) -> str | None:
    r"""Return a completion's answer: the content of its last \boxed{…}, or else its stripped text.

    None if there is no box and the text is long.
    """
    boxed = last_box(text)
    if boxed is not None:
        return boxed
    return text.strip() if len(text) <= LONGEST_ANSWER else None


def pass_at(k: int, n: int, c: int) -> float:
    """Return the chance that one of k answers is right, drawn from n of which c are right.

    1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return whether the most frequent answer is right, in [0, 1].

    Answers that tie for it share it, as if one were drawn by lot. Answers with the same text are
    the same answer. None has no vote; if all are None, the result is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    right: dict[str, list[bool]] = {answer: [] for answer in winners}
    for answer, verdict in zip(answers, correct, strict=True):
        if answer in right:
            right[answer].append(verdict)
    if not right:
        return 0.0
    return sum(sum(verdicts) / most for verdicts in right.values()) / len(right)


def require_same_settings(target: str, settings: dict[str, Any], other: Evaluation) -> None:
    """Raise `EvaluationError` if `other` was not asked with the settings of `target`."""
    for name, value in settings.items():
        if other.settings.get(name) != value:
            raise EvaluationError(
                f"{target!r} is asked with {name} {value}, {other.target!r} was with"
                f" {other.settings.get(name)}; evaluate both alike"
            )


def differences(own: Evaluation, other: Evaluation) -> dict[str, list[float]]:
    """Return by benchmark, for each question, the fraction of right answers of `own` minus that of
    `other`.

    Raises `EvaluationError` if they were not asked the same questions in the same way.
    """
    require_same_settings(own.target, own.settings, other)
    own_results, compared = (
        {result.name: result for result in side.results} for side in (own, other)
    )
    if own_results.keys() != compared.keys():
        raise EvaluationError(
            f"{own.target!r} was asked {', '.join(own_results)}, {other.target!r}"
            f" {', '.join(compared)}; ask both the same"
        )
    per_question = {}
    for name, result in own_results.items():
        values = _by_question(result)
        reference = _by_question(compared[name])
        if values.keys() != reference.keys():
            text, _ = min(values.keys() ^ reference.keys())
            raise EvaluationError(
                f"{name}: {own.target!r} and {other.target!r} were not asked the same questions:"
                f" one alone has {quoted(text)}; evaluate both on one file"
            )
        per_question[name] = [value - reference[key] for key, value in values.items()]
    return per_question


def _by_question(result: Result) -> dict[tuple[str, int], float]:
    """Return the fraction of right answers by question and how often it was asked before.

    Questions are matched by text and not by id, because ids name files, which may be copies.
    """
    seen: Counter[str] = Counter()
    shares = {}
    for question, share in zip(result.questions, result.shares(), strict=True):
        shares[question.question, seen[question.question]] = share
        seen[question.question] += 1
    return shares


def write_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as data for JSON: all figures, each question's answers and verdicts.

    NaN occurs in it, which strict JSON has not.
    """
    return {
        "target": evaluation.target,
        "dtype": evaluation.dtype,
        "settings": evaluation.settings,
        "mean": asdict(evaluation.mean()),
        "benchmarks": [_written(result) for result in evaluation.results],
    }


def _written(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "samples": result.samples,
        "accuracy": asdict(result.average()),
        "pass_at": {str(k): asdict(value) for k, value in result.passes().items()},
        "majority": asdict(result.majority()),
        "tokens": result.tokens,
        "truncated": result.truncated,
        "questions": [asdict(question) for question in result.questions],
    }


def read_evaluation(file: Path) -> Evaluation:
    """Read a file that `qarl eval --json` wrote. Raises `EvaluationError` for any other file."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        results = TypeAdapter(tuple[Result, ...]).validate_python(tree["benchmarks"])
        return Evaluation(
            target=tree["target"],
            dtype=tree["dtype"],
            settings=tree["settings"],
            results=results,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{str(file)!r} is nothing that `qarl eval --json` wrote ({type(error).__name__}:"
            f" {error}); name such a file, or a checkpoint to evaluate"
        ) from error


def describe(result: Result) -> Iterator[str]:
    """Yield a result's figures in words."""
    yield f"{percent(result.average())} of {len(result.questions)} held-out problems"
    if result.samples > 1:
        yield ", ".join(
            f"pass@{k} {figure.mean:.1%}" for k, figure in result.passes().items() if k > 1
        )
        yield f"maj@{result.samples} {result.majority().mean:.1%}"
    yield f"{result.tokens:.0f} tokens an answer"
    if result.truncated:
        yield f"{result.truncated:.1%} truncated"


def percent(figure: Estimate) -> str:
    """Return an accuracy as text, "40.6% [36.3, 44.9]", without the interval if it is unknown."""
    if math.isnan(figure.low):
        return f"{figure.mean:.1%}"
    return f"{figure.mean:.1%} [{100 * figure.low:.1f}, {100 * figure.high:.1f}]"


def points(figure: Estimate) -> str:
    """Return a difference as text, "+3.1 points [-1.0, +7.2]", without an unknown interval."""
    if math.isnan(figure.low):
        return f"{100 * figure.mean:+.1f} points"
    interval = f"[{100 * figure.low:+.1f}, {100 * figure.high:+.1f}]"
    return f"{100 * figure.mean:+.1f} points {interval}"
