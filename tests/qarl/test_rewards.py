"""Rewards and checkers: shipped and a person's own, in every signature, and whatever those may do
to a run.
"""

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from qarl.configs.load import config_from_tree
from qarl.configs.schema.task import TaskConfig
from qarl.preflight.prompts import check_prompts
from qarl.report.metrics import batch_metrics
from qarl.rollout.types import Completion, Group, Prompt
from qarl.run.policy import open_architecture
from qarl.tasks import (
    Problem,
    Response,
    RewardError,
    TaskError,
    load_task,
    scorers,
    short_reward,
)
from qarl.tasks.base import Failure
from qarl.tasks.rewards import exact_answer, exact_reward, last_box
from qarl.tasks.scorers import in_this_process, judges_alone
from qarl.tasks.task import Task
from qarl.tasks.worker import Job
from qarl.tasks.workers import Worker
from tests.support.cases import pattern
from tests.support.forks import ROOT

PLAIN = Problem("p", "3 + 4 =", "7", {"style": "short"})
CHAT = Problem(
    "c",
    "3 + 4 =",
    "7",
    {},
    ({"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 4 ="}),
)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file of one question into the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "3 + 4 =", "answer": "7", "split": "train"}\n')
    return tmp_path


def own(folder: Path, code: str, spec: str = "mine.py:f", **fields: Any) -> Task:
    """Return the task of `questions`, whose reward is in its own file and process."""
    (folder / "mine.py").write_text(code + "\n")
    return load_task(TaskConfig(name="q.jsonl", reward=spec, **fields))


def here(folder: Path, code: str, time_limit: float = 5.0) -> Task:
    """Return the same task with its reward in this process, which saves a quarter of a second a
    case.
    """
    (folder / "mine.py").write_text(code + "\n")
    task = load_task(TaskConfig(name="q.jsonl"))
    return dataclasses.replace(
        task, reward=in_this_process("reward", "mine.py:f", "q.jsonl", time_limit)
    )


def rewards(
    task: Task,
    *texts: str,
    problem: Problem = PLAIN,
) -> list[float | None]:
    return task.rewards([Response(problem, text, tuple(range(len(text)))) for text in texts])


def test_a_right_boxed_answer_is_rewarded_and_counted(questions: Path):
    """It was worth 1.0 under a reward of one's own, and nothing to accuracy."""
    named = Problem("p", "", "A")
    assert [exact_reward(named, text) for text in ("A", " A\n", "a")] == [1.0, 1.0, 0.0]
    assert [exact_answer(named, text) for text in ("A", r"\boxed{A}", "a", r"\boxed{a}")] == [
        True,
        True,
        False,
        False,
    ]
    texts = [
        r"3 + 4 is seven, so \boxed{7}",
        "7",
        " 7\n",
        r"\boxed{8}",
        r"\boxed{7} or \boxed{8}",
        "77",
        "",
    ]
    right = [True, True, True, False, False, False, False]
    for reward in (None, "exact"):
        task = load_task(TaskConfig(name="q.jsonl", reward=reward))
        assert rewards(task, *texts) == right
    assert task.correct([Response(PLAIN, text) for text in texts]) == right


BOXES = [
    ("\\boxed{7}", "7"),
    ("\\boxed{ \\frac{1}{2} } and so on", "\\frac{1}{2}"),
    ("\\boxed{1} then \\boxed{2}", "2"),
    ("\\boxed{\\text{a \\boxed{1}}}", "\\text{a \\boxed{1}}"),
    ("\\boxed{1", None),
    ("\\boxed{ \\boxed{3}", "3"),
    ("boxed 7", None),
]


@pytest.mark.parametrize(("text", "box"), [*BOXES, ("\\boxed{" * 3000, None)])
def test_the_last_complete_box_counts(text: str, box: str | None):
    assert last_box(text) == box


def test_a_reward_and_a_checker_may_differ(questions: Path):
    code = (
        "def f(problem, text):\n    return -len(text)\ndef right(problem, text):\n    return"
        " problem.answer in text"
    )
    task = own(questions, code, correct="mine.py:right")
    assert rewards(task, "it is 7") == [-7.0]
    judged = Response(PLAIN, "it is 7", reward=0.5)
    assert task.rewards([judged, Response(PLAIN, "8")]) == [0.5, -1.0]
    fails = dataclasses.replace(task, reward=lambda responses: [1 / len(responses)])
    assert fails.rewards([judged]) == [0.5]  # asked for nothing
    assert task.correct([Response(PLAIN, "it is 7"), Response(PLAIN, "8")]) == [
        True,
        False,
    ]


SIGNATURES = {
    "qarl": ("def f(problem, text):\n    return float(text == problem.answer)"),
    "qarl, with ids": (
        "def f(problem, text, token_ids):\n    return float(token_ids == (0,) and text == '7')"
    ),
    "trl": (
        "def f(completions, answer, **kwargs):\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]"
    ),
    "trl, in full": (
        "def f(prompts, completions, completion_ids, style, **kwargs):\n"
        "    assert prompts == ['3 + 4 ='] * 2 and style == ['short'] * 2\n"
        "    pairs = zip(completions, completion_ids)\n"
        "    return [float(len(ids) == 1 and c == '7') for c, ids in pairs]"
    ),
    "trl, of ids alone": (
        "def f(completions_ids, log_metric=None, **kwargs):\n"
        "    log_metric('length', 1.0)\n"
        "    kwargs['log_extra']('text', kwargs['completions'])\n"
        "    pairs = zip(kwargs['completions'], completions_ids)\n"
        "    return [float(c == '7' and len(i) == 1) for c, i in pairs]"
    ),
    "trl, async": (
        "async def f(completions, **kwargs):\n    return [float(c == '7') for c in completions]"
    ),
    "verl": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'q.jsonl' and extra_info == {'style': 'short'}\n"
        "    return {'score': float(solution_str == ground_truth)}"
    ),
    "verl, async": (
        "async def f(solution_str, ground_truth):\n"
        "    return {'score': float(solution_str == ground_truth)}"
    ),
    "async": (
        "import asyncio\n"
        "\n"
        "\n"
        "async def f(problem, text):\n"
        "    await asyncio.sleep(0)\n"
        "    return text == '7'"
    ),
    "an enumeration": (
        "import enum\n"
        "\n"
        "\n"
        "class Verdict(enum.IntEnum):\n"
        "    RIGHT, WRONG = 1, 0\n"
        "\n"
        "\n"
        "def f(problem, text):\n"
        "    return Verdict.RIGHT if text == '7' else Verdict.WRONG"
    ),
    "numpy": ("import numpy\n\n\ndef f(problem, text):\n    return numpy.float32(text == '7')"),
}


@pytest.mark.parametrize("code", SIGNATURES.values(), ids=SIGNATURES)
def test_every_signature_rewards_alike(code: str, questions: Path):
    assert rewards(here(questions, code), "7", "no") == [1.0, 0.0]


CALLABLES = {
    "async instance, a batch": "class F:\n    __call__ = method(batch)\nf = F()",
    "async instance": "class F:\n    __call__ = method(one)\nf = F()",
    "async method": "class F:\n    score = method(one)\nf = F().score",
    "static async method": "class F:\n    score = staticmethod(one)\nf = F.score",
    "partial": "f = functools.partial(one, strict=True)",
    "partial of an async instance": (
        "class F:\n    __call__ = method(batch)\nf = functools.partial(F(), strict=True)"
    ),
    "wrapper": "@functools.wraps(one)\ndef f(*a, **b):\n    return one(*a, **b)",
    "sync instance of a coroutine": (
        "class F:\n    def __call__(self, problem, text):\n        return one(problem, text)\n"
        "f = F()"
    ),
    "lambda": "f = lambda completions, answer, **columns: batch(completions, answer)",
    "task": "def f(problem, text):\n    return asyncio.create_task(one(problem, text))",
    "future": (
        "def f(completions, answer, **columns):\n"
        "    return asyncio.gather(*[right(c, a) for c, a in zip(completions, answer)])"
    ),
    "coroutine of a coroutine": "async def f(problem, text):\n    return one(problem, text)",
    "at times": ("def f(problem, text):\n    return 1.0 if text == '7' else one(problem, text)"),
    "generator": "def f(completions, answer):\n    yield from map(equal, completions, answer)",
    "async generator": (
        "async def f(completions, answer):\n"
        "    for c, a in zip(completions, answer):\n        yield await right(c, a)"
    ),
}
"""Functions of any shape, made of the coroutines below."""
COROUTINES = """import asyncio, functools
LOOPS = set()
equal = lambda a, b: float(a == b)
async def right(text, answer):
    LOOPS.add(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return equal(text, answer) if len(LOOPS) == 1 else -1.0
async def one(problem, text, strict=False):
    return await right(text, problem.answer)
async def batch(completions, answer, strict=False):
    return [await right(c, a) for c, a in zip(completions, answer)]
def method(function):
    if function is one:
        async def bound(self, problem, text, strict=False):
            return await one(problem, text)
    else:
        async def bound(self, completions, answer, strict=False):
            return await batch(completions, answer)
    return bound
"""


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("code", CALLABLES.values(), ids=CALLABLES.keys())
def test_every_callable_rewards_alike(code: str, questions: Path):
    """They are awaited in one loop from batch to batch, so a client that they keep stays usable."""
    task = here(questions, COROUTINES + code)
    assert rewards(task, "7", "8", "7") == [1.0, 0.0, 1.0]
    assert rewards(task, "8") == [0.0]


RETURNED = {
    "tuple": "tuple(right)",
    "map": "map(float, right)",
    "values": "dict(enumerate(right)).values()",
    "array": "numpy.array(right)",
    "array of float16": "numpy.array(right, dtype=numpy.float16)",
    "array of objects": "numpy.array([*right[:-1], None], dtype=object)",
    "tensor": "torch.tensor(right)",
    "bfloat16, with a gradient": "torch.tensor(right, dtype=torch.bfloat16, requires_grad=True)",
    "int64": "torch.tensor(right, dtype=torch.int64)",
    "scalars": "[numpy.float32(right[0]), torch.tensor(right[1]), numpy.bool_(right[2]), None]",
    "scalars of one element": "[torch.tensor([float(r)]) for r in right]",
    "series": "pandas.Series(right, index=[9, 4, 1, 0])",
}


def test_outcomes_of_any_kind_arrive_from_the_functions_process(questions: Path):
    """Expected: 1 where the text is 7; None where a function gave None in the last place."""
    code = (
        "import numpy, pandas, torch\ndef f(completions, answer, returned):\n"
        "    right = [c == a for c, a in zip(completions, answer)]\n    return eval(returned[0])\n"
    )
    task = own(questions, code)
    for name, returned in RETURNED.items():
        problem = dataclasses.replace(PLAIN, metadata={"returned": returned})
        last = None if "None" in returned else 0.0
        assert rewards(task, "7", "8", "7", "8", problem=problem) == [1.0, 0.0, 1.0, last], name


def test_an_awaited_call_that_takes_too_long_fails_alone(questions: Path):
    code = (
        "import asyncio\nasync def late(problem, text):\n"
        "    await asyncio.sleep(9 if text == '8' else 0)\n    return 1.0\n"
        "def f(problem, text):\n    return late(problem, text)"
    )
    task = own(questions, code, time_limit=0.3, on_error="none")
    assert rewards(task, "7", "8", "7") == [1.0, None, 1.0]


@pytest.mark.parametrize(
    ("reward", "alone"),
    [
        (None, False),
        ("exact", False),
        ("qarl.tasks:exact_reward", False),
        ("exact, mine.py:f=0.1", False),
        ("mine.py:f", True),
        ("mine.py:f=1, package.module:g=0.5", True),
    ],
)
def test_only_functions_of_ones_own_need_no_answers(reward: str | None, alone: bool):
    """Contract: QaRL's rewards compare with answers, under whatever name they are asked for."""
    assert judges_alone(reward) is alone


def test_trls_chats_are_messages(questions: Path):
    """TRL's documentation says: if a prompt is a chat, completions are."""
    code = (
        "def f(prompts, completions, **_):\n    assert prompts[0][0] == {'role': 'system',"
        " 'content': 'Add.'}\n"
    )
    code += "    return [float(c[0]['content'] == '7') for c in completions]"
    assert rewards(here(questions, code), "7", "8", problem=CHAT) == [1.0, 0.0]
    assert rewards(here(questions, code), "7", problem=CHAT) == [1.0]


def test_trls_rewards_see_each_problem_in_its_own_form(questions: Path):
    """Contract: chats among questions that are text change neither's form, in any order."""
    code = "def f(completions, **_):\n    return [float(isinstance(c, str)) for c in completions]"
    task = here(questions, code)
    text = task.problems("train", 0, 1, 0)[0]
    for problems in ((text, CHAT), (CHAT, text)):
        responses = [Response(problem, "7") for problem in problems]
        assert task.rewards(responses) == [float(not problem.messages) for problem in problems]


def test_several_rewards_with_weights(questions: Path):
    """Contract: None adds nothing; if all rewards are None, there is no signal."""
    code = "def right(problem, text):\n    return None if text == '?' else float(text == '7')\n\n\n"
    code += (
        "def short(completions, **kwargs):\n    return [None if c == '?' else -len(c) for c in"
        " completions]"
    )
    task = own(questions, code, spec="mine.py:right=2, mine.py:short=0.1")
    sums = rewards(task, "7", "8", "77", "?")
    assert sums == [2 - 0.1, -0.1, -0.2, None]
    kept = tuple(pickle.loads(pickle.dumps(each)) for each in sums[:3])
    answer = Completion((1,), (0.0,), "", 0, "stop")
    counted = batch_metrics([Group(Prompt("p", "", (1,)), (answer,) * 3, kept)])["rewards"]
    expected = {
        "right": {"mean": 1 / 3, "deviation": 2**0.5 / 3},
        "short": {"mean": -4 / 3, "deviation": 2**0.5 / 3},
    }
    assert {name: pytest.approx(values) for name, values in counted.items()} == expected


UNUSABLE_REWARDS = [
    pytest.param(
        None,
        "def f(*arguments, **named):\n    return 1.0",
        "(*arguments, **named) are of no kind…a wrapper shows those of what it wraps by functools",
        id="a-wrapper-without-names",
    ),
    pytest.param(
        None,
        "def f(text, completions):\n    return 1.0",
        "are of 2 kinds of reward at once",
        id="are-of-2-kinds",
    ),
    pytest.param(None, "f = 3", "has no function 'f'", id="has-no-function-f"),
    pytest.param(
        None,
        "import sys\nsys.exit(4)",
        "sys.exit(4) (…mine.py, line 2, in <module>)",
        id="sys.exit-4-mine.py-line",
    ),
    pytest.param(
        None,
        "1 / 0",
        "ZeroDivisionError: division by zero (…mine.py, line 1",
        id="ZeroDivisionError-division-by-zero",
    ),
    pytest.param(
        "mine.py:f",
        "1 / 0",
        "ZeroDivisionError: division by zero (…mine.py, line 1",
        id="ZeroDivisionError-division-by-zero-mine.py",
    ),
    pytest.param(
        "mine.py:f",
        "import os\nos._exit(5)",
        "importing it ended its process (exit status 5)",
        id="importing-it-ended-its",
    ),
    pytest.param(
        "mine.py:f",
        "import os\nos.kill(os.getpid(), 9)",
        "importing it ended its process (signal 9)",
        id="importing-it-ended-its-process",
    ),
    pytest.param("exakt", "", "did you mean 'exact'", id="did-you-mean-exact"),
    pytest.param(
        "no/such/file.py:f", "", "there is no file 'no/such/file.py'", id="there-is-no-file"
    ),
    pytest.param(
        "qarl.tasks:nothing",
        "",
        "'qarl.tasks' has no function 'nothing'",
        id="qarl.tasks-has-no-function",
    ),
    pytest.param(
        "mine.py:f=much",
        "",
        "the weight 'much' must be a finite number that is not 0, as in mine.py:reward=0.5",
        id="the-weight-much-must",
    ),
    pytest.param(
        "mine.py:f=inf",
        "def f(problem, text): return 1.0",
        "the weight 'inf' must be a finite number",
        id="the-weight-inf-must",
    ),
]


@pytest.mark.parametrize(("spec", "code", "said"), UNUSABLE_REWARDS)
def test_unusable_rewards_are_refused(spec: str | None, code: str, said: str, questions: Path):
    """They are refused in this process, where no spec says otherwise, and in another one, in the
    same words.
    """
    with pytest.raises(TaskError, match=pattern(said)):
        here(questions, code) if spec is None else own(questions, code, spec)


FAILING_REWARDS = [
    (
        "def f(problem, text):\n    return {}['oops']",
        "raised KeyError: 'oops' (…mine.py, line 2, in f)",
    ),
    (
        "def f(completions, **kwargs):\n    return 1.0",
        "returned a float for 2 completions; give one number for each, in a list",
    ),
    (
        "import numpy\ndef f(completions, **kwargs):\n    return numpy.zeros((3, 1))",
        "returned a ndarray of shape (3, 1) for 2 completions",
    ),
    (
        "import torch\ndef f(completions, **kwargs):\n    return torch.zeros(())",
        "returned a Tensor of shape () for 2 completions",
    ),
    (
        "import numpy\ndef f(completions, **kwargs):\n    return numpy.array([1, numpy.nan])",
        "returned nan (float); a reward must be a finite number",
    ),
    (
        "def f(completions, **kwargs):\n    return {'7': 1.0, '8': 0.0}",
        "returned a dict of 2 for 2 completions; give one number for each, in a list",
    ),
    (
        "def f(completions, **kwargs):\n    while True:\n        yield 1.0",
        "returned a generator of more than 2 for 2 completions",
    ),
    (
        "def f(completions, **kwargs):\n    yield 1.0\n    {}['oops']",
        "raised KeyError: 'oops'",
    ),
    ("def f(completions, **kwargs):\n    1 / 0", "raised ZeroDivisionError"),
    (
        ("def f(completions, **k):\n    return [c[0]['content'] for c in completions]"),
        "completions are chats where",
    ),
    (
        ("def f(completions, style2, **kwargs):\n    return []"),
        "asks for a column 'style2', and the task has style",
    ),
    (
        ("def f(completion_ids, trainer_state):\n    return []"),
        "'trainer_state'…is not known where rewards run",
    ),
    (
        ("async def f(problem, text):\n    import asyncio\n    await asyncio.sleep(99)"),
        "took longer than",
    ),
    (
        ("async def f(problem, text):\n    raise TimeoutError('of a judge')"),
        "raised TimeoutError: of a judge",
    ),
]


@pytest.mark.parametrize(("code", "said"), FAILING_REWARDS)
def test_whatever_a_reward_does_is_an_error(code: str, said: str, questions: Path):
    with pytest.raises(RewardError, match=pattern(said)) as caught:
        rewards(here(questions, code, time_limit=0.2), "7", "8")
    assert "problem id: p" in str(caught.value)


ENDED_PROCESSES = [
    (
        ("def f(problem, text):\n    import os\n    os._exit(7)"),
        "ended its process (exit status 7)",
    ),
    (
        ("def f(problem, text):\n    import os\n    os.kill(os.getpid(), 11)"),
        "ended its process (signal 11)",
    ),
    (
        "def f(problem, text):\n    while True:\n        pass",
        "took longer than task.time_limit 0.2 s; raise it",
    ),
    ("def f(problem, text):\n    return lambda: 1", "returned <function …, which is not a number"),
]


@pytest.mark.parametrize(("code", "said"), ENDED_PROCESSES)
def test_what_hangs_or_ends_its_process_is_an_error_in_bounded_time(
    code: str, said: str, questions: Path
):
    """And what it had started ends with its process, at the latest when the next one begins."""
    begin = (
        "import subprocess\nopen('pids', 'a').write(f\"{subprocess.Popen(['sleep', '300']).pid}"
        ' ")\n\n\n'
    )
    task = own(questions, begin + code, time_limit=0.2)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(RewardError, match=pattern(said)):
            rewards(task, "7", "8")
    assert time.monotonic() - start < 30  # of a busy machine
    first, *later = Path("pids").read_text().split()
    psutil.wait_procs(
        [process for process in psutil.process_iter() if later and process.pid == int(first)],
        timeout=10,
    )
    alive = (
        psutil.pid_exists(int(first))
        and psutil.Process(int(first)).status() != psutil.STATUS_ZOMBIE
    )
    assert alive == (not later)


ENDLESS = r"""
import os, re, subprocess
from qarl.configs.schema.task import TaskConfig
from qarl.tasks import Problem, Response, load_task

def f(problem, text):
    sleeping = subprocess.Popen(["sleep", "300"])
    open("pids", "w").write(f"{os.getpid()} {sleeping.pid}\n")
    re.match(r"(a+)+$", "a" * 64 + "b")

if __name__ == "__main__":
    task = load_task(TaskConfig(name="q.jsonl", reward="mine.py:f"))
    task.rewards([Response(Problem("p", "?", "7"), "7")])
"""


def test_nothing_outlives_a_run_that_is_killed(questions: Path):
    """A reward's process, in code that lets no other thread of it run, and what it had started."""
    (questions / "mine.py").write_text(ENDLESS)
    run = subprocess.Popen(
        [sys.executable, "mine.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    while run.poll() is None and not (
        (file := Path("pids")).exists() and file.read_text().endswith("\n")
    ):
        time.sleep(0.05)
    processes = [psutil.Process(int(pid)) for pid in Path("pids").read_text().split()]
    run.kill()
    run.wait()
    time.sleep(0.5)  # for the system's init to take them over
    left = [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    for process in left:
        process.kill()
    assert left == []


def test_a_failing_reward_is_asked_again_or_left_out(
    questions: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    """Contract: only what failed is asked again, twice, a line each; if it goes on the run stops,
    or has no signal.
    """
    monkeypatch.setattr(scorers, "_RETRY_SECONDS", (0.0, 0.0))
    code = (
        "asked = []\n\n\ndef f(problem, text):\n    asked.append(text)\n    open('asked',"
        " 'a').write(text)\n"
    )
    code += "    if text == 'e':\n        return float('nan')\n"
    code += "    return 1.0 / (text != 'b' or asked.count('b') > {}) if text != 'c' else 1 / 0"
    with caplog.at_level(logging.WARNING):
        assert rewards(own(questions, code.format(1), on_error="retry"), "a", "b", "d") == [
            1.0,
            1.0,
            1.0,
        ]
        assert Path("asked").read_text() == "abdb"
        assert rewards(own(questions, code.format(9), on_error="none"), "a", "b", "c", "e") == [
            1.0,
            None,
            None,
            None,
        ]
    assert [record.args[:2] for record in caplog.records] == [(1, 3), (3, 4)]
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        rewards(own(questions, code.format(9), on_error="retry"), "a", "b")
    trial = {"name": "q.jsonl", "reward": "mine.py:f", "on_error": "none"}
    sizes = {"max_prompt_tokens": 64, "max_new_tokens": 8}
    config = config_from_tree({"task": trial, "rollout": sizes, "eval": {"problems": 0}})
    check_prompts(config, load_task(config.task), open_architecture(config))


def test_a_reward_may_not_take_more_memory_than_it_is_allowed(questions: Path):
    """Memory allocated beyond it is a failure like any other, or ends its process; a task loads
    without its reward.
    """
    own_score = "int(open('/proc/self/oom_score_adj').read())"
    code = (
        f"def f(problem, text):\n    return len(bytearray(int(text) << 20)) / 2**20 + {own_score}"
    )
    task = own(questions, code, on_error="none", memory_limit=0.75)
    assert rewards(task, "1", "1000", "2") == [1001.0, None, 1002.0]
    with pytest.raises(
        RewardError,
        match=r"MemoryError.*line 2, in f\); raise task\.memory_limit 0\.75 GiB, or bound",
    ):
        rewards(own(questions, code, memory_limit=0.75), "1000")
    config = TaskConfig(name="q.jsonl", reward="mine.py:f", on_error="none", memory_limit=1)
    assert rewards(load_task(config.model_copy(update={"reward": None})), "7") == [1.0]
    for field in ({"on_error": "none"}, {"memory_limit": 1, "reward": "exact"}):
        with pytest.raises(ValueError, match="is for your own reward"):
            TaskConfig.model_validate(field)


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_ends_its_process_fails_alone_or_with_what_follows(goes_on: bool, questions: Path):
    """The one where answers are judged apart, as mathematics is."""
    (questions / "mine.py").write_text(
        "import os\n\n\ndef f(problem, text):\n    return 1 if text else os._exit(1)\n"
    )
    job = Job("reward", "mine.py:f", "q.jsonl", time_limit=5.0, path=())
    outcomes = Worker(job, goes_on).outcomes(
        [Response(PLAIN, text) for text in ("1", "", "2", "3")]
    )
    assert [isinstance(each, Failure) for each in outcomes] == [
        False,
        True,
        not goes_on,
        not goes_on,
    ]


def test_after_a_failure_the_next_call_has_a_process_again(
    questions: Path, capfd: pytest.CaptureFixture[str]
):
    """And what the reward prints stays out of its answers."""
    code = "import os\n\n\ndef f(problem, text):\n    print('thinking')\n"
    task = own(
        questions,
        code + "    return os._exit(1) if text == 'die' else float(text == '7')",
    )
    with pytest.raises(RewardError, match="ended its process"):
        rewards(task, "7", "die", "8")
    assert rewards(task, "7", "8") == [1.0, 0.0]
    out, err = capfd.readouterr()
    assert not out
    assert "thinking" in err


@pytest.mark.parametrize("spec", ["own_reward:f", "own_reward.py:f", "./own_reward.py:f"])
def test_a_reward_is_found_in_the_working_folder(
    questions: Path, monkeypatch: pytest.MonkeyPatch, spec: str
):
    """It is found by module and by file, with a neighbour it imports; `qarl` itself is no script
    of that folder.
    """
    (questions / "own_reward.py").write_text(
        "def f(problem, text):\n    import neighbour\n    return neighbour.two\n"
    )
    (questions / "neighbour.py").write_text("two = 2\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert rewards(own(questions, "", spec=spec), "7") == [2.0]


def test_the_shortest_answer_is_worth_most():
    assert [short_reward(PLAIN, text) for text in ("", "2", " 22")] == [0.0, -1.0, -3.0]
