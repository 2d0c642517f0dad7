"""Tasks of worked solutions: the reference solution is right line by line, only the final answer counts, and the
embedded policies that learn them can write them down."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from qarl.configs.load import config_file, default_config, load_config
from qarl.configs.schema.task import TaskConfig
from qarl.embedded.recipe import IGNORED, RECIPES, encode_problems, recipe_tokenizer, tiny_names
from qarl.embedded.tokenizer import PAD, token_id
from qarl.tasks import Response, Task, load_task, solution_of
from qarl.tasks.worked import final_answer, running_totals
from tests.support.profiles import examples

LONG = [name for name in tiny_names() if RECIPES[name].task == "running_total"]


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task(TaskConfig(name="running_total"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return recipe_tokenizer(RECIPES["tiny-qwen3-long"])


@given(terms=st.lists(st.integers(-(10**8), 10**8), min_size=2, max_size=30))
@settings(max_examples=examples(200))
def test_every_line_of_a_solution_is_true_and_the_last_is_the_sum(terms: list[int]) -> None:
    """Each line goes on from the result of the line before."""
    solution, total = running_totals(terms), str(terms[0])
    for line in solution.split("\n"):
        left, operator, right, result = _parts(r"(-?\d+) ([+-]) (\d+) = (-?\d+)", line)
        assert left == total and int(result) == int(left) + int(operator + right)
        total = result
    assert final_answer(solution) == str(sum(terms))


@given(seed=st.integers(0, 2**40), start=st.integers(0, 2000))
@settings(max_examples=examples(30))
def test_a_problem_s_answer_is_the_sum_it_asks_for(seed: int, start: int, task: Task) -> None:
    (problem,) = task.problems("heldout", start, 1, seed)
    (asked,) = _parts(r"Add step by step: (\d(?: [+-] \d){15})", problem.question)
    terms = [int(term) for term in asked.replace("+ ", "+").replace("- ", "-").split()]
    assert terms == problem.metadata["terms"] and problem.answer == str(sum(terms))
    assert all(0 <= sum(terms[:count]) < 100 for count in range(1, 17))
    response = [Response(problem, solution_of(problem))]
    assert task.correct(response) == [True] and task.rewards(response) == [1.0]


def test_only_the_final_answer_counts_and_it_is_all_or_nothing(task: Task) -> None:
    (problem,) = task.problems("train", 0, 1, 0)
    right, solution = problem.answer, solution_of(problem)
    for text in (right, f" {right}\n", f"1 + 1 = 3 = {right}", solution):
        assert task.correct([Response(problem, text)]) == [True] and task.rewards([Response(problem, text)]) == [1.0]
    for text in ("", right[:-1], f"{right}0", f"0{right}", f"{solution} =", f"{solution}\n1 + 1 = 2", f"{right} = x"):
        assert task.correct([Response(problem, text)]) == [False] and task.rewards([Response(problem, text)]) == [0.0]


def test_terms_and_digits_are_options() -> None:
    task = load_task(TaskConfig(name="running_total", options={"min_terms": 3, "max_terms": 4, "digits": 2}))
    chains = [problem.metadata["terms"] for problem in task.problems("train", 0, 50, 0)]
    assert {len(chain) for chain in chains} == {3, 4}
    assert all(10 <= abs(term) < 100 for chain in chains for term in chain)


@pytest.mark.parametrize("name", tiny_names())
def test_an_embedded_policy_learns_what_it_was_warmed_up_on(name: str) -> None:
    config = load_config(default_config(name), {})
    assert (config.model, config.task.name) == (name, RECIPES[name].task)


@pytest.mark.parametrize("name", LONG)
def test_solutions_are_long_and_fit(name: str, task: Task, tokenizer: PreTrainedTokenizerFast) -> None:
    config = load_config(config_file(name), {})
    ids, labels = encode_problems(tokenizer, task.problems("train", 0, 1000, 0))
    lengths = labels.ne(IGNORED).sum(dim=1)
    prompts = ids.ne(token_id(tokenizer, PAD)).sum(dim=1) - lengths
    assert int(lengths.min()) >= 40 and 64 <= float(lengths.double().mean()) <= 256
    assert int(lengths.max()) <= config.rollout.max_new_tokens
    assert int(prompts.max()) <= config.rollout.max_prompt_tokens


def _parts(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that has to match the whole text."""
    match = re.fullmatch(pattern, text)
    assert match, text
    return match.groups()
