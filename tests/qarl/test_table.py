"""Tasks made of a person's own rows: the same problems by every road, what is left out, and every
fault named.
"""

import csv
import json
import random
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from qarl.configs.errors import ModelError
from qarl.configs.hub import hub_or_cache
from qarl.configs.schema.task import TaskConfig
from qarl.planning.shapes import sizes_of
from qarl.quant.checkpoint.load import load_config, resolve_model
from qarl.tasks import Problem, Response, RewardError, Table, Task, TaskError, load_task
from qarl.tasks.rows import Row
from qarl.tasks.table import Columns, make_table
from tests.support.cases import pattern

ROWS: list[dict[str, Any]] = [
    {"question": f"{i} + 1 =", "answer": str(i + 1), "source": "made up"} for i in range(100)
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Write the rows in the format of the path's suffix; a folder becomes a data set of one Parquet
    file.
    """
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        (path / "data").mkdir(parents=True)
        write(path / "data" / "train-00000-of-00001.parquet", rows)
    return path


def load(path: Path | str, **fields: Any) -> Task:
    return load_task(TaskConfig(name=str(path), **fields))


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_problems(ending: str, tmp_path: Path):
    """Contract: stateless, disjoint, repeating every question in a new order; other columns are
    metadata.
    """
    task = load(write(tmp_path / f"q{ending}"))
    train, heldout = (
        {p.question for p in task.problems(split, 0, 100, 3)} for split in ("train", "heldout")
    )
    assert len(train) + len(heldout) == 100
    assert heldout
    assert not train & heldout
    assert task.problems("train", 5, 300, 3) == task.problems("train", 0, 305, 3)[5:]
    one_pass = task.problems("train", len(train), len(train), 3)
    assert {p.question for p in one_pass} == train
    assert one_pass != task.problems("train", 0, len(train), 3)
    assert one_pass[0].metadata == {"source": "made up"}
    same = load(write(tmp_path / "same.jsonl")).problems("train", 0, 20, 0)
    assert [(p.question, p.answer) for p in task.problems("train", 0, 20, 0)] == [
        (p.question, p.answer) for p in same
    ]


def test_prompts_alone_are_judged_by_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Right is what the reward gives 1 or more, or what the checker says; without a function
    answers are missed.
    """
    (tmp_path / "mine.py").write_text(
        "def few(completions, **rest): return [2 - len(c) if c else None for c in completions]\n"
        "def named(completions, solution): return [0.0] * len(solution)\n"
    )
    monkeypatch.chdir(tmp_path)
    bare = write(
        tmp_path / "q.jsonl",
        [{"prompt": row["question"], "kind": "sum"} for row in ROWS],
    )
    task = load(bare, reward="mine.py:few")
    rows = "100 rows, column 'prompt' for the missing 'question', prompts alone"
    assert task.describe() == f"{bare}: {rows}; 84 to train on, 16 held out"
    (problem,) = task.problems("train", 0, 1, 0)
    assert (problem.answer, problem.metadata) == ("", {"kind": "sum"})
    responses = [Response(problem, text) for text in ("", "a", "ab")]
    assert task.rewards(responses) == [None, 1, 0]
    assert task.correct(responses) == [False, True, False]
    assert load(bare, prompt="prompt", reward="mine.py:few", correct="exact").correct(
        responses
    ) == [True, False, False]
    for fields, said in [
        ({}, "or judge prompts without answers"),
        ({"answer": "kid", "reward": "mine.py:few"}, "'kid'"),
        ({"reward": "exct"}, "reward 'exct' must read .*did you mean 'exact'"),
    ]:
        with pytest.raises(TaskError, match=said):
            load(bare, prompt="prompt", **fields)
    with pytest.raises(
        RewardError,
        match=r"reward 'mine.py:named' of task .* asks for a column 'solution', .* has kind",
    ):
        load(bare, reward="mine.py:named").rewards(responses)


@pytest.mark.usefixtures("hub_cache")
def test_a_local_data_set(tmp_path: Path):
    """A folder as it lies on the Hub, and one that `save_to_disk` wrote; columns by name, splits by
    name.
    """
    rows = [
        {"problem": row["question"], "reward_model": {"ground_truth": row["answer"]}}
        for row in ROWS
    ]
    rows[7]["reward_model"]["ground_truth"] = None
    columns = {"prompt": "problem", "answer": "reward_model.ground_truth"}
    folder = write(tmp_path / "set", rows)
    task = load(f"hf:{folder}", **columns)
    (problem,) = task.problems("train", 0, 1, 0)
    assert int(problem.question.split()[0]) + 1 == int(problem.answer)
    assert problem.id.startswith(f"hf:{folder}[train]:")
    splits: Any = {
        "train": datasets.Dataset.from_list(rows[:60]),
        "test": datasets.Dataset.from_list(rows[60:]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "disk")
    task = load(f"hf:{tmp_path / 'disk'}", heldout="test", **columns)
    told = (
        f"hf:{tmp_path / 'disk'}: 100 rows, left out 1 without an answer; 59 to train on, 40"
        " held out"
    )
    assert task.describe() == told
    for name, fields, said in [
        (
            f"hf:{folder}",
            {"split": "dev", **columns},
            r"Unknown split \"dev\".*--task\.split",
        ),
        (
            f"hf:{tmp_path / 'disk'}",
            {"split": "dev", **columns},
            "no split 'dev'; it has train, test",
        ),
        (
            f"hf:{folder}",
            {},
            (
                r"no column 'answer'; there are: problem, reward_model; did you mean"
                r" 'reward_model\.ground_truth'\? \(name it by --task\.answer, or "
            ),
        ),
        (f"hf:{tmp_path / 'none'}", {}, "there is no folder"),
    ]:
        with pytest.raises(TaskError, match=said):
            load(name, **fields)


@pytest.mark.usefixtures("hub_cache")
def test_without_a_network_nothing_waits_for_the_hub(monkeypatch: pytest.MonkeyPatch):
    """Contract: a data set says how to copy it; a model is refused as soon. Afterwards the Hub is
    asked again, and where there is a host it is asked as ever.
    """

    def waited(seconds: float):
        pytest.fail(f"waits for {seconds} s")

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", waited)
    with pytest.raises(
        TaskError,
        match=r"'hf:no/such' cannot be loaded.*`hf download --repo-type dataset no/such",
    ):
        load("hf:no/such")
    for config_of in (load_config, sizes_of, resolve_model):
        with pytest.raises(
            ModelError,
            match=r"no connection to http://127.0.0.1:9, and not in the cache",
        ):
            config_of("no/such")
    assert not constants.HF_HUB_OFFLINE
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.handle_request).start()
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT",
            f"http://127.0.0.1:{server.server_port}",
        )
        with hub_or_cache():
            assert not constants.HF_HUB_OFFLINE


def test_a_prompt_may_be_a_chat(tmp_path: Path):
    said = [
        ("system", "Add."),
        ("user", "1 + 1 ="),
        ("assistant", "2"),
        ("user", "and 1 more?"),
    ]
    turns = [{"role": role, "content": text} for role, text in said]
    task = load(
        write(tmp_path / "t.jsonl", [{"prompt": turns, "answer": "3", "split": "train"}]),
        prompt="prompt",
    )
    (problem,) = task.problems("train", 0, 1, 0)
    assert problem.chat == turns
    assert problem.question == "and 1 more?"
    doubled = load(tmp_path / "t.jsonl", prompt="prompt", system="Be brief.")
    with pytest.raises(
        TaskError,
        match=r"task\.system 'Be brief\.' is given, but problem 't\.jsonl:1' begins with a",
    ):
        doubled.problems("train", 0, 1, 0)


def test_an_explicit_split_is_obeyed(tmp_path: Path):
    rows = [
        {"question": "a", "answer": "1", "split": "train"},
        {"question": "b", "answer": " 2", "split": "heldout"},
    ]
    (problem,) = load(write(tmp_path / "t.jsonl", rows)).problems("heldout", 0, 1, 0)
    assert problem == Problem("t.jsonl:2", "b", " 2")


def test_what_is_left_out_is_counted(tmp_path: Path):
    questions = [
        ("a", "1", "train"),
        ("a", "1", "train"),
        ("a", "2", "train"),
        ("longer", "1", "train"),
    ]
    questions.append(("b", "1", "heldout"))
    rows = [
        {"question": question, "answer": answer, "split": split}
        for question, answer, split in questions
    ]
    task = load(write(tmp_path / "t.jsonl", rows)).without_long_prompts(
        lambda problems: [len(p.question) < 3 for p in problems]
    )
    left = "left out 2 repeated (1 with another answer) and 1 longer than rollout.max_prompt_tokens"
    assert task.describe() == f"{tmp_path / 't.jsonl'}: 5 rows, {left}; 1 to train on, 1 held out"
    assert [p.answer for p in task.problems("train", 0, 2, 0)] == ["1", "1"]
    empty = task.without_long_prompts(lambda problems: [False] * len(problems))
    with pytest.raises(
        TaskError,
        match=r"has no train questions, left out .*; raise --rollout\.max_prompt_tokens",
    ):
        empty.problems("train", 0, 1, 0)


BAD_FILES = [
    (
        "t.csv",
        "question,answer,answer\n1+1,2,3\n",
        "a column appears twice: question, answer, answer",
    ),
    ("t.jsonl", '{"question": "a", "answer": true}\n', "'answer' must be text …; got true"),
    ("t.jsonl", '{"question": "1"\n', "t.jsonl:1: not valid JSON"),
    ("t.jsonl", '{"question": "1 \\ud83d", "answer": "2"}\n', "t.jsonl:1: not valid JSON"),
    ("t.jsonl", "[1]\n", "t.jsonl:1: expected a JSON object, got [1]"),
    ("t.jsonl", '{"question": "é"}\n', "t.jsonl:1: not UTF-8 text"),
    ("t.jsonl", '{"question": "a", "answer": null}\n', "'answer' must be text …; got null"),
    (
        "t.csv",
        "question,answer\n1 + 1 =,2,3\n",
        "t.csv:2: more fields than the 2 columns; quote fields",
    ),
    (
        "t.csv",
        "question,answer\n1 + 1 =\n",
        "t.csv:2: 1 of 2 fields; missing: answer. Add them, or remove the row",
    ),
    ("t.csv", "question,answer\né,2\n", "t.csv:2: not UTF-8 text (byte 0xe9)"),
    ("t.parquet", "no parquet", "is not a Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_unreadable_task_files_are_named(name: str, content: str, message: str, tmp_path: Path):
    """More of them: tests/qarl/test_planted_faults.py."""
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(TaskError, match=pattern(message)):
        load(tmp_path / name)


def test_whole_numbers_are_answers_and_a_byte_order_mark_is_none(tmp_path: Path):
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"question": "1 + 1 = é", "answer": 2, "split": "train"}\n',
        encoding="utf-8-sig",
    )
    assert load(file).problems("train", 0, 1, 0)[0].answer == "2"
    write(tmp_path / "q.parquet", [{"question": "a", "answer": 3, "split": "train"}])
    assert load(tmp_path / "q.parquet").problems("train", 0, 1, 0)[0].answer == "3"


def test_a_built_in_task_is_never_shortened():
    task = load_task(TaskConfig(name="chain_sum"))
    assert task.without_long_prompts(lambda problems: [False] * len(problems)) is task
    assert task.describe() is None
    assert not isinstance(task.source, Table)


@pytest.mark.parametrize(
    ("columns", "missing", "hint"),
    [
        ("problem solution split", "question", "problem"),
        ("problem solution", "answer", "solution"),
        ("solution answer", "question", None),
        ("question prompt", "answer", None),
        ("instruction input output", "question", "instruction"),
        ("instruction input output", "answer", "output"),
        ("question_type problem_id problem solution", "question", "problem"),
        ("Query groundTruth", "question", "Query"),
        ("Query groundTruth", "answer", "groundTruth"),
        ("questions answers", "question", "questions"),
        ("question_answer text", "question", None),
        ("text", "question", None),
        ("problem solution prompts", "promts", "prompts"),
    ],
)
def test_the_hint_for_a_question_is_never_an_answers_column(
    columns: str, missing: str, hint: str | None
):
    """difflib takes solution for question; followed, the policy would be asked the answers."""
    row = Row("q.jsonl:1", dict.fromkeys(columns.split(), "1 + 1"))
    wanted = Columns(prompt="question", answer=missing)
    if missing != "answer":
        wanted = Columns(prompt=missing, answer=None)
    elif "question" not in row.values:
        wanted = Columns(prompt=columns.split()[0], answer=missing)
    with pytest.raises(TaskError) as caught:
        make_table("q.jsonl", [row], wanted)
    said = f"; did you mean {hint!r}? (name it by" if hint else f"{columns.split()[-1]} (name it by"
    assert said in str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_hint_never_swaps_questions_and_answers(seed: int):
    """Contract: whatever columns there are, the hint for a question names no answer's column, and
    the reverse. Drawn: names by which people have both, their case and plural, and others.
    """
    draw = random.Random(seed)
    questions = ["problem", "instruction", "query", "input", "question"]
    answers = ["solution", "response", "output", "ground_truth", "target", "completion", "answer"]
    missing = draw.choice(["question", "answer"])
    swapped = answers if missing == "question" else questions
    meant = draw.sample(questions if missing == "question" else answers, draw.choice([0, 0, 2]))
    names = [name for name in [*meant, *draw.sample(swapped, 3), "level"] if name != missing]
    changes = [str, str.title, str.upper, lambda name: f"{name}s", lambda name: f"raw_{name}"]
    drawn = {draw.choice(changes)(name): name for name in names}
    columns = [name for name in drawn if name != missing]
    row = Row("q.jsonl:1", dict.fromkeys([*columns, "present"], "1 + 1"))
    wanted = Columns(prompt="question", answer=None)
    if missing == "answer":
        wanted = Columns(prompt="present", answer="answer")
    with pytest.raises(TaskError) as caught:
        make_table("q.jsonl", [row], wanted)
    hint = re.search(r"did you mean '(\w+)'", str(caught.value))
    assert hint is None or drawn.get(hint[1]) not in swapped


def test_the_hint_for_an_answer_may_be_a_nested_value():
    row = Row("q.jsonl:1", {"question": "1 + 1", "reward_model": {"ground_truth": "2"}})
    with pytest.raises(TaskError, match=r"did you mean 'reward_model\.ground_truth'"):
        make_table("q.jsonl", [row], Columns())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"Videos": ["a.mp4"]}, "Videos"),
        (
            {"question": [{"role": "user", "content": [{"type": "audio"}, {"type": "text"}]}]},
            "question",
        ),
    ],
)
def test_rows_with_sound_or_video_are_refused_by_name(more: dict[str, Any], named: str):
    """Contract: columns and parts of a message; an empty column is none."""
    row = {"question": "what is in it?", "answer": "a cat", "audio": None, "images": []}
    assert make_table("q.jsonl", [Row("q.jsonl:1", row)], Columns())
    with pytest.raises(TaskError, match=rf"^q\.jsonl:1: '{named}' holds sound or video"):
        make_table("q.jsonl", [Row("q.jsonl:1", {**row, **more})], Columns())
