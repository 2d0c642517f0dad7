"""Tasks: stateless problems, disjoint splits, exact rewards, and errors that say what to change;
their list on the command line, each with its options and an example. Of worked solutions every line
is right, only the final answer counts, and the embedded policies that learn them can write them
down.
"""

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.cli.main import main
from qarl.configs.load import config_file, default_config, load_config
from qarl.configs.schema.task import TaskConfig
from qarl.embedded.recipe import IGNORED, RECIPES, encode_problems, recipe_tokenizer
from qarl.tasks import (
    Problem,
    ReasoningGymTask,
    Response,
    RewardError,
    Task,
    TaskError,
    load_task,
    solution_of,
)
from qarl.tasks.procedural import reasoning_gym_datasets
from qarl.tasks.rewards import each
from qarl.tasks.worked import final_answer, running_totals
from tests.support.profiles import examples


@pytest.fixture(scope="module")
def chain_sum() -> ReasoningGymTask:
    return ReasoningGymTask("chain_sum")


@given(start=st.integers(0, 2000), count=st.integers(0, 40), seed=st.integers(0, 2**40))
@settings(max_examples=examples(30))
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_problem_k_does_not_depend_on_what_else_was_asked(
    split, start, count, seed, chain_sum
) -> None:
    assert chain_sum.problems(split, start, count, seed) == [
        ReasoningGymTask("chain_sum").problems(split, start + k, 1, seed)[0] for k in range(count)
    ]


def test_problems_are_the_same_in_another_process_and_others_with_another_seed(
    chain_sum,
) -> None:
    script = (
        "from qarl.tasks import ReasoningGymTask; "
        "print([p.question for p in ReasoningGymTask('chain_sum').problems('heldout', 0, 4, 7)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([p.question for p in chain_sum.problems("heldout", 0, 4, 7)])
    assert chain_sum.problems("train", 0, 8, 0) != chain_sum.problems("train", 0, 8, 1)


def test_splits_share_no_question(chain_sum) -> None:
    train = {p.question for seed in (0, 1) for p in chain_sum.problems("train", 0, 4000, seed)}
    heldout = {p.question for seed in (0, 1) for p in chain_sum.problems("heldout", 0, 1000, seed)}
    assert len(train) > 3000
    assert len(heldout) > 300
    assert not train & heldout


def test_chain_sum_defaults_to_two_terms_of_at_most_two_digits(chain_sum) -> None:
    for problem in chain_sum.problems("train", 0, 200, 0):
        left, operator, right = problem.metadata["expression"].split()
        assert max(len(left), len(right)) <= 2
        assert int(problem.answer) == int(left) + (int(right) if operator == "+" else -int(right))


@pytest.mark.parametrize(
    ("text", "score", "correct"),
    [("7", 1.0, True), (" 7\n", 1.0, True), ("77", 0.5, False), ("8", 0.0, False)],
)
def test_chain_sum_gives_partial_credit_that_is_not_accuracy(
    text, score, correct, chain_sum
) -> None:
    problem = Problem("p", "3 + 4 =", "7")
    assert chain_sum.score(problem, text) == score
    assert (chain_sum.scorer()([Response(problem, text)]) == [1.0]) is correct


def test_a_task_too_small_to_set_questions_aside_says_so(chain_sum, monkeypatch) -> None:
    monkeypatch.setattr("qarl.tasks.procedural.is_heldout", lambda question, pictures: False)
    with pytest.raises(
        TaskError,
        match=r"no heldout question in 256 draws.*too small to set questions aside",
    ):
        chain_sum.problems("heldout", 0, 1, 0)


def test_options_and_requests_that_a_task_refuses(chain_sum) -> None:
    for message, refused in (
        (
            r"task\.options\.seed has no effect: the run's --seed decides",
            lambda: ReasoningGymTask("chain_sum", {"seed": 2}),
        ),
        (
            "max_terms must be >= min_terms",
            lambda: ReasoningGymTask("chain_sum", {"min_terms": 3, "max_terms": 2}),
        ),
        (
            "unknown split 'test'; allowed: train, heldout",
            lambda: chain_sum.problems("test", 0, 1, 0),
        ),
        ("start=-1", lambda: chain_sum.problems("train", -1, 1, 0)),
    ):
        with pytest.raises(TaskError, match=message):
            refused()


@pytest.mark.parametrize("field", ["prompt", "answer", "subset", "split", "heldout"])
def test_fields_of_a_file_are_refused_for_a_built_in_task(field) -> None:
    with pytest.raises(
        TaskError,
        match=rf"task\.{field} 'x' names part of a file.*'chain_sum' is not one: omit it",
    ):
        load_task(TaskConfig.model_validate({"name": "chain_sum", field: "x"}))


def test_a_bad_reward_names_problem_and_completion() -> None:
    """Other faults of a reward: tests/qarl/test_rewards.py and
    tests/qarl/test_planted_faults.py.
    """
    task = dataclasses.replace(
        load_task(TaskConfig(name="chain_sum")),
        reward=each(lambda problem, text: 1e300),
    )
    with pytest.raises(
        RewardError, match=r"returned 1e\+300 \(float\); .*at most 1e\+15 in magnitude"
    ) as caught:
        task.rewards([Response(Problem("id-9", "3 + 4 =", "7"), "some text")])
    for part in ("chain_sum", "id-9", "3 + 4 =", "some text"):
        assert part in str(caught.value)


def test_a_checker_says_true_or_false() -> None:
    task = load_task(TaskConfig(name="chain_sum"))
    response = Response(Problem("id-9", "3 + 4 =", "7"), "7")
    for outcome, verdict in ((True, True), (1.0, True), (0, False)):
        assert dataclasses.replace(task, checker=lambda _, o=outcome: [o]).correct([response]) == [
            verdict
        ]
    for outcome in (0.5, None, "yes"):
        with pytest.raises(
            RewardError,
            match=r"the checker of task 'chain_sum' returned .*; a verdict must be true",
        ):
            dataclasses.replace(task, checker=lambda _, o=outcome: [o]).correct([response])


@pytest.mark.parametrize("columns", [80, 200])
def test_every_task_has_a_name_and_a_line(columns: int, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert named == sorted(reasoning_gym_datasets())


def test_light_commands_load_nothing_heavy():
    """Reports and tasks neither torch nor what brings it; a task's own library only where a task is
    shown.
    """
    code = (
        "import sys, qarl.page.build, qarl.tasks; from qarl.cli.main import main\n"
        "heavy = {'torch', 'vllm', 'transformers'}\n"
        "assert not {*heavy, 'reasoning_gym'} & {*sys.modules}\n"
        "assert main(['tasks', 'lcm']) == 0 and not heavy & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LONG = [name for name in RECIPES if RECIPES[name].task == "running_total"]


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task(TaskConfig(name="running_total"))


@given(terms=st.lists(st.integers(-(10**8), 10**8), min_size=2, max_size=30))
@settings(max_examples=examples(200))
def test_every_line_of_a_solution_is_true_and_the_last_is_the_sum(
    terms: list[int],
) -> None:
    """Each line goes on from the result of the line before."""
    solution = running_totals(terms)
    total = str(terms[0])
    for line in solution.split("\n"):
        ((left, operator, right, result),) = re.findall(r"^(-?\d+) ([+-]) (\d+) = (-?\d+)$", line)
        assert left == total
        assert int(result) == int(left) + int(operator + right)
        total = result
    assert final_answer(solution) == str(sum(terms))


@given(seed=st.integers(0, 2**40), start=st.integers(0, 2000))
@settings(max_examples=examples(30))
def test_a_problem_s_answer_is_the_sum_it_asks_for(seed: int, start: int, task: Task) -> None:
    (problem,) = task.problems("heldout", start, 1, seed)
    (chain,) = re.findall(r"^Add step by step: (\d(?: [+-] \d){15})$", problem.question)
    terms = [int(term) for term in chain.replace("+ ", "+").replace("- ", "-").split()]
    assert terms == problem.metadata["terms"]
    assert problem.answer == str(sum(terms))
    assert all(0 <= sum(terms[:count]) < 100 for count in range(1, 17))
    response = [Response(problem, solution_of(problem))]
    assert task.correct(response) == [True]
    assert task.rewards(response) == [1.0]


def test_only_the_final_answer_counts_and_it_is_all_or_nothing(task: Task) -> None:
    (problem,) = task.problems("train", 0, 1, 0)
    right = problem.answer
    solution = solution_of(problem)
    for text in (right, f" {right}\n", f"1 + 1 = 3 = {right}", solution):
        assert task.correct([Response(problem, text)]) == [True]
        assert task.rewards([Response(problem, text)]) == [1.0]
    for text in (
        "",
        right[:-1],
        f"{right}0",
        f"0{right}",
        f"{solution} =",
        f"{solution}\n1 + 1 = 2",
        f"{right} = x",
    ):
        assert task.correct([Response(problem, text)]) == [False]
        assert task.rewards([Response(problem, text)]) == [0.0]


def test_terms_and_digits_are_options() -> None:
    task = load_task(
        TaskConfig(name="running_total", options={"min_terms": 3, "max_terms": 4, "digits": 2})
    )
    chains = [problem.metadata["terms"] for problem in task.problems("train", 0, 50, 0)]
    assert {len(chain) for chain in chains} == {3, 4}
    assert all(10 <= abs(term) < 100 for chain in chains for term in chain)


@pytest.mark.parametrize("name", RECIPES)
def test_an_embedded_policy_learns_what_it_was_warmed_up_on(name: str) -> None:
    config = load_config(default_config(name), {})
    assert (config.model, config.task.name) == (name, RECIPES[name].task)


@pytest.mark.parametrize("name", LONG)
def test_solutions_are_long_and_fit(name: str, task: Task) -> None:
    config = load_config(config_file(name), {})
    tokenizer = recipe_tokenizer(RECIPES[name])
    pad: Any = tokenizer.pad_token_id
    ids, labels = encode_problems(tokenizer, task.problems("train", 0, 1000, 0))
    lengths = labels.ne(IGNORED).sum(dim=1)
    prompts = ids.ne(pad).sum(dim=1) - lengths
    assert int(lengths.min()) >= 40
    assert 64 <= float(lengths.double().mean()) <= 256
    assert int(lengths.max()) <= config.rollout.max_new_tokens
    assert int(prompts.max()) <= config.rollout.max_prompt_tokens


@pytest.mark.parametrize("name", ["countdown", "prime_factorization"])
def test_what_a_data_set_cannot_read_is_wrong_and_what_it_evaluates_ends_no_run(
    name: str,
) -> None:
    task = load_task(TaskConfig(name=name))
    (problem,) = task.problems("train", 0, 1, 0)
    rewards = task.rewards(
        [Response(problem, "abc"), Response(problem, '__import__("os")._exit(3)')]
    )
    assert all(reward is not None and reward < 0.1 for reward in rewards), rewards
