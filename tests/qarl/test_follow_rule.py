"""The task `follow_rule`: an answer that follows its rule is right, and one that does not is wrong.

Answers are built from the rule of a drawn question. Not covered: whether a model can learn the
rules, which docs/lab/real.md measures.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qarl.configs.schema.task import TaskConfig
from qarl.tasks import Task, load_task
from qarl.tasks.base import Response
from qarl.tasks.follow_rule import NUMBERS, RULES, follows

WORDS = ["owls", "hunt", "quietly", "at", "night", "and", "sleep", "by", "day"]


def following(rule: str, value: str) -> str:
    """Return an answer of at least three words that follows the rule."""
    return {
        "lowercase": "owls hunt at night.",
        "uppercase": "OWLS HUNT AT NIGHT.",
        "words": " ".join(WORDS[: NUMBERS.get(value, 0)]),
        "first": f"{value}, owls hunt at night.",
        "last": f"Owls hunt {value}.",
        "without": "Owls hunt at night.",
        "question": "Do owls hunt at night?",
        "lines": "\n".join(["Owls hunt at night."] * NUMBERS.get(value, 0)),
    }[rule]


def breaking(rule: str, value: str) -> str:
    """Return an answer that differs from `following` in what the rule asks for."""
    return {
        "lowercase": "Owls hunt at night.",
        "uppercase": "OWLS HUNT AT NIGHt.",
        "words": following(rule, value) + " long",
        "first": f"Owls, {value}, hunt at night.",
        "last": f"{value} owls hunt at night.",
        "without": "Owls hunt in The dark.",
        "question": "Do owls hunt? Do they sleep?",
        "lines": following(rule, value) + "\n\nThey sleep by day.",
    }[rule]


@pytest.fixture(scope="module")
def task() -> Task:
    """Return the task as `--task follow_rule` loads it."""
    return load_task(TaskConfig(name="follow_rule"))


@pytest.mark.parametrize(
    ("rule", "value"), [(rule, value) for rule, (_, values) in RULES.items() for value in values]
)
def test_an_answer_is_right_if_and_only_if_it_follows_the_rule(rule: str, value: str) -> None:
    assert follows(rule, value, following(rule, value))
    assert not follows(rule, value, breaking(rule, value))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("text", ["", " \n", "owls", "OWLS", "always always", "perhaps again?"])
def test_an_answer_of_two_words_or_fewer_is_wrong(rule: str, text: str) -> None:
    assert not follows(rule, RULES[rule][1][0], text)


@given(start=st.integers(0, 10_000), seed=st.integers(0, 10_000))
def test_a_question_states_the_rule_that_is_judged(task: Task, start: int, seed: int) -> None:
    (problem,) = task.problems("train", start, 1, seed)
    rule = problem.metadata["rule"]
    sentence, values = RULES[rule]
    value = problem.metadata["value"]
    assert value in values
    assert problem.answer == ""
    assert problem.question.endswith(sentence.format(value))
    right = Response(problem, following(rule, value))
    wrong = Response(problem, breaking(rule, value))
    assert task.rewards([right, wrong]) == [1.0, 0.0]
    assert task.correct([right, wrong]) == [True, False]


def test_training_and_held_out_questions_are_disjoint_and_both_hold_every_rule(task: Task) -> None:
    splits = {split: task.problems(split, 0, 400, seed=0) for split in ("train", "heldout")}
    questions = {split: {p.question for p in problems} for split, problems in splits.items()}
    assert not questions["train"] & questions["heldout"]
    for problems in splits.values():
        assert {problem.metadata["rule"] for problem in problems} == set(RULES)
