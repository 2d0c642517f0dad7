"""Tasks: stateless problems, disjoint splits, exact rewards, and errors that say what to change."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.tasks import JsonlTask, Problem, ReasoningGymTask, RewardError, TaskError, checked_score, load_task
from tests.support.profiles import examples


@pytest.fixture(scope="module")
def chain_sum() -> ReasoningGymTask:
    return ReasoningGymTask("chain_sum")


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def jsonl_path(tmp_path: Path) -> Path:
    rows = [{"question": f"{i} + 1", "answer": str(i + 1), "source": "made up"} for i in range(100)]
    return write_jsonl(tmp_path / "sums.jsonl", rows)


@given(start=st.integers(0, 2000), count=st.integers(0, 40), seed=st.integers(0, 2**40))
@settings(max_examples=examples(30))
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_problem_k_does_not_depend_on_what_else_was_asked(split, start, count, seed, chain_sum) -> None:
    assert chain_sum.problems(split, start, count, seed) == [
        ReasoningGymTask("chain_sum").problems(split, start + k, 1, seed)[0] for k in range(count)
    ]


def test_a_later_window_is_a_slice_of_an_earlier_one(chain_sum) -> None:
    assert chain_sum.problems("train", 5, 3, 0) == chain_sum.problems("train", 0, 8, 0)[5:8]


def test_problems_are_the_same_in_another_process(chain_sum) -> None:
    script = (
        "from qarl.tasks import load_task; "
        "print([p.question for p in load_task('chain_sum', {}).problems('heldout', 0, 4, 7)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([p.question for p in chain_sum.problems("heldout", 0, 4, 7)])


def test_splits_share_no_question(chain_sum) -> None:
    train = {p.question for seed in (0, 1) for p in chain_sum.problems("train", 0, 4000, seed)}
    heldout = {p.question for seed in (0, 1) for p in chain_sum.problems("heldout", 0, 1000, seed)}
    assert len(train) > 3000 and len(heldout) > 300
    assert not train & heldout


def test_seeds_give_different_problems(chain_sum) -> None:
    assert chain_sum.problems("train", 0, 8, 0) != chain_sum.problems("train", 0, 8, 1)


def test_chain_sum_defaults_to_two_terms_of_at_most_two_digits(chain_sum) -> None:
    for problem in chain_sum.problems("train", 0, 200, 0):
        left, operator, right = problem.metadata["expression"].split()
        assert max(len(left), len(right)) <= 2
        assert int(problem.answer) == int(left) + (int(right) if operator == "+" else -int(right))


def test_given_options_replace_the_defaults() -> None:
    task = load_task("chain_sum", {"min_terms": 3, "max_terms": 3})
    assert all(len(p.metadata["expression"].split()) == 5 for p in task.problems("train", 0, 20, 0))


@pytest.mark.parametrize(
    ("text", "score", "correct"),
    [("7", 1.0, True), (" 7\n", 1.0, True), ("77", 0.5, False), ("8", 0.0, False)],
)
def test_chain_sum_gives_partial_credit_that_is_not_accuracy(text, score, correct, chain_sum) -> None:
    problem = Problem("p", "3 + 4 =", "7")
    assert checked_score(chain_sum, problem, text) == score
    assert chain_sum.correct(problem, text) is correct


@given(text=st.text())
@settings(max_examples=examples(100))
def test_any_completion_scores_within_0_and_1(text, chain_sum) -> None:
    assert 0.0 <= checked_score(chain_sum, Problem("p", "3 + 4 =", "7"), text) <= 1.0


def test_unknown_task_names_near_matches_and_how_to_list() -> None:
    with pytest.raises(TaskError, match=r"unknown task 'chain_sums'; did you mean chain_sum.*\.jsonl.*`qarl tasks`"):
        load_task("chain_sums", {})


def test_unknown_option_quotes_the_allowed_ones() -> None:
    with pytest.raises(TaskError, match=r"option 'max_term' of task 'chain_sum'; allowed: min_terms, max"):
        load_task("chain_sum", {"max_term": 2})


def test_seed_and_size_are_not_options() -> None:
    with pytest.raises(TaskError, match="'seed' is chosen by QaRL"):
        load_task("chain_sum", {"seed": 2})


def test_refused_option_values_are_quoted() -> None:
    with pytest.raises(TaskError, match=r"refuses the options.*max_terms must be >= min_terms"):
        load_task("chain_sum", {"min_terms": 3, "max_terms": 2})


def test_a_task_too_small_to_set_questions_aside_says_so(chain_sum, monkeypatch) -> None:
    monkeypatch.setattr("qarl.tasks.procedural.is_heldout", lambda question: False)
    with pytest.raises(TaskError, match=r"no heldout question in 256 draws.*too small to set questions aside"):
        chain_sum.problems("heldout", 0, 1, 0)


@pytest.mark.parametrize(
    ("split", "start", "count", "message"),
    [("test", 0, 1, "unknown split 'test'; allowed: train, heldout"), ("train", -1, 1, "start=-1")],
)
def test_bad_requests(split, start, count, message, chain_sum, jsonl_path) -> None:
    for task in (chain_sum, JsonlTask(jsonl_path)):
        with pytest.raises(TaskError, match=message):
            task.problems(split, start, count, 0)


def test_jsonl_is_stateless_disjoint_and_repeats_every_question(jsonl_path) -> None:
    task = load_task(str(jsonl_path), {})
    train, heldout = ({p.question for p in task.problems(split, 0, 100, 3)} for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 100 and heldout and not train & heldout
    assert task.problems("train", 5, 300, 3) == task.problems("train", 0, 305, 3)[5:]
    one_pass = task.problems("train", len(train), len(train), 3)
    assert {p.question for p in one_pass} == train
    assert one_pass != task.problems("train", 0, len(train), 3)
    assert one_pass[0].metadata == {"source": "made up"}


def test_jsonl_obeys_an_explicit_split(tmp_path) -> None:
    rows = [
        {"question": "a", "answer": "1", "split": "train"},
        {"question": "b", "answer": " 2", "split": "heldout"},
    ]
    task = JsonlTask(write_jsonl(tmp_path / "t.jsonl", rows))
    (problem,) = task.problems("heldout", 0, 1, 0)
    assert (problem.id, problem.question) == ("t.jsonl:2", "b")
    assert (task.score(problem, "2\n"), task.score(problem, "2.0")) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"question": "a", "answer": "b"}\n{oops\n', r"t\.jsonl:2: not valid JSON"),
        ("[1]\n", r"t\.jsonl:1: expected a JSON object, got list"),
        ('\n{"question": "a"}\n', r"t\.jsonl:2: missing key 'answer'; found: question"),
        ('{"question": "a", "answer": 3}\n', "'answer' must be a string, got 3"),
        ('{"question": "a", "answer": "b", "split": "dev"}\n', "unknown split 'dev'; allowed: train"),
        (
            '{"question": "a", "answer": "b", "split": "train"}\n{"question": "a", "answer": "b", "split": "heldout"}',
            r"t\.jsonl:2: question 'a' is in both splits",
        ),
    ],
)
def test_bad_jsonl_files(content, message, tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        JsonlTask(path)


def test_missing_jsonl_file_and_missing_split(tmp_path) -> None:
    with pytest.raises(TaskError, match="does not exist"):
        load_task(str(tmp_path / "none.jsonl"), {})
    path = write_jsonl(tmp_path / "t.jsonl", [{"question": "a", "answer": "1", "split": "train"}])
    with pytest.raises(TaskError, match="has no heldout questions; add lines"):
        JsonlTask(path).problems("heldout", 0, 1, 0)
    with pytest.raises(TaskError, match="takes no options, got: max_terms"):
        load_task(str(path), {"max_terms": 2})


def test_a_user_reward_replaces_the_score_but_not_accuracy(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_reward.py").write_text("def length(problem, text):\n    return -len(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task("chain_sum", {}, reward="my_reward:length")
    (problem,) = task.problems("train", 0, 1, 0)
    assert checked_score(task, problem, "abc") == -3.0
    assert task.correct(problem, problem.answer) and not task.correct(problem, "abc")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("no_colon", "must read file.py:function or package.module:function"),
        ("no_such_module:f", "there is no module 'no_such_module', neither in the working folder.*PYTHONPATH"),
        ("no/such/file.py:f", "there is no file 'no/such/file.py'"),
        ("qarl.tasks:exact_rewrad", "no function 'exact_rewrad'; did you mean 'exact_reward'"),
        ("qarl.tasks:nothing", "'qarl.tasks' has no function 'nothing'"),
    ],
)
def test_rewards_that_cannot_be_imported(reward, message) -> None:
    with pytest.raises(TaskError, match=message):
        load_task("chain_sum", {}, reward=reward)


@pytest.mark.parametrize("spec", ["own_reward:reward", "own_reward.py:reward", "./own_reward.py:reward"])
def test_a_reward_is_found_in_the_working_folder(tmp_path, monkeypatch, spec) -> None:
    """By module and by file, with a neighbour it imports; `qarl` itself is no script of that folder."""
    (tmp_path / "own_reward.py").write_text(
        "def reward(problem, text):\n    import neighbour\n    return neighbour.two\n"
    )
    (tmp_path / "neighbour.py").write_text("two = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for name in ("own_reward", "neighbour"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    task = load_task("chain_sum", {}, reward=spec)
    assert checked_score(task, task.problems("train", 0, 1, 0)[0], "x") == 2.0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit(4)", r"sys\.exit\(4\) \(.*r\.py, line 2, in <module>\)"),
        ("def reward(:", r"SyntaxError: invalid syntax \(.*r\.py, line 1\)"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*r\.py, line 1"),
        ("import no_such_thing", r"ModuleNotFoundError: No module named 'no_such_thing' \(.*line 1"),
    ],
)
def test_a_broken_reward_file_is_quoted_with_its_line(tmp_path, code, said) -> None:
    (tmp_path / "r.py").write_text(code + "\n")
    with pytest.raises(TaskError, match=said):
        load_task("chain_sum", {}, reward=f"{tmp_path}/r.py:reward")


def test_a_task_file_may_begin_with_a_byte_order_mark(tmp_path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "1 + 1 = é", "answer": "2", "split": "train"}\n', encoding="utf-8-sig")
    assert load_task(str(file), {}).problems("train", 0, 1, 0)[0].answer == "2"
    file.write_bytes(file.read_bytes().decode("utf-8-sig").encode("latin-1"))
    with pytest.raises(TaskError, match=r"q\.jsonl:1: not UTF-8 text \(byte 0xe9\); save the file as UTF-8"):
        load_task(str(file), {})


@pytest.mark.parametrize(
    ("name", "said"), [("q.json", r"jq -c '\.\[\]' q\.json > q\.jsonl"), ("q.csv", "csv.DictReader")]
)
def test_other_formats_name_a_converter(name, said) -> None:
    with pytest.raises(TaskError, match=said):
        load_task(name, {})


def raising(problem: Problem, text: str) -> float:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raising, r"raised KeyError: 'oops' \(.*line \d+, in raising\)"),
        (lambda problem, text: sys.exit(3), r"raised sys\.exit\(3\)"),
        (lambda problem, text: 1e300, r"returned 1e\+300 \(float\); .*at most 1e\+15 in magnitude"),
        (lambda problem, text: float("nan"), "returned nan"),
        (lambda problem, text: float("inf"), "returned inf"),
        (lambda problem, text: None, r"returned None \(NoneType\)"),
        (lambda problem, text: "1", "must be a finite number"),
    ],
)
def test_a_bad_reward_names_problem_and_completion(reward, message, chain_sum, monkeypatch) -> None:
    monkeypatch.setattr(chain_sum, "score", reward)
    with pytest.raises(RewardError, match=message) as caught:
        checked_score(chain_sum, Problem("id-9", "3 + 4 =", "7"), "some text")
    for part in ("chain_sum", "id-9", "3 + 4 =", "some text"):
        assert part in str(caught.value)
    assert (reward is not raising) or isinstance(caught.value.__cause__, KeyError)


def test_importing_tasks_loads_neither_torch_nor_reasoning_gym() -> None:
    script = "import sys, qarl.tasks; print({'torch', 'vllm', 'reasoning_gym'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
