"""`qarl init` and `qarl check`: what is written is healthy, and more than fifty faults of
configuration, questions, reward, template and model, planted in it one at a time, are found and
named.
"""

import ast
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from qarl.cli.main import main
from qarl.configs.load import load_config
from qarl.report.finding import Finding
from qarl.starter import FILES
from qarl.tasks import Response, load_task
from tests.support.expected import assert_expected, finding_lines

Tree = dict[str, Any]


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_policy) -> Path:
    """Return the folder that `qarl init` writes, as the working folder, with a policy that needs no
    warm start.
    """
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    file = tmp_path / "mine" / "run.yaml"
    file.write_text(file.read_text().replace("model: tiny-qwen3", f"model: {random_policy(True)}"))
    return tmp_path / "mine"


@pytest.fixture
def folder(starter: Path) -> Path:
    """Return the starter reduced to eight questions that are judged by exact answers."""
    rows = [json.loads(line) for line in Path("questions.jsonl").read_text().splitlines()]
    save(
        [
            row
            for split in ("train", "heldout")
            for row in [r for r in rows if r["split"] == split][:4]
        ]
    )
    set_field("task", {"name": "questions.jsonl"})
    return starter


def save(rows: list[Tree]) -> None:
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def set_field(path: str, value: Any) -> None:
    """Set a field, given by its dotted path, in run.yaml."""
    tree = yaml.safe_load(Path("run.yaml").read_text())
    *parents, leaf = path.split(".")
    part = tree
    for key in parents:
        part = part.setdefault(key, {})
    part[leaf] = value
    Path("run.yaml").write_text(yaml.safe_dump(tree))


def said_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of a check that finds a fault, with single spaces."""
    capsys.readouterr()
    assert main(["check", "run.yaml"]) in (1, 2)
    out, err = capsys.readouterr()
    return " ".join((out + err).split())


FAULTS_OF_CONFIGURATION = [
    ("stpes", 5, "unknown key 'stpes' in run.yaml; did you mean steps: …?"),
    (
        "rollout.max_new_tokens",
        1,
        "a step asks 64 prompts, and there are 4: they come again in it (--prompts)",
    ),
    ("steps", 0, "steps 0 must be greater than or equal to 1"),
    ("scheme", "w4a17", "unknown scheme 'w4a17'"),
    ("dtype", "half", "dtype 'half' must be 'bfloat16', 'float16' or 'float32'"),
    ("layers", "*.down_proj", "'*.down_proj' is not a layer rule; write PATTERN=SCHEME"),
    ("layers", "*.down_proj=int3", "layer rule '*.down_proj=int3': unknown scheme 'int3'"),
    ("model", "no/such/folder", "model folder 'no/such/folder' does not exist"),
    ("output", "questions.jsonl/run", "cannot make run folder 'questions.jsonl/run'"),
    (
        "rollout.top_k",
        20,
        "rollout.top_k: a policy is trained on completions of its whole distribution",
    ),
    (
        "rollout.router_replay",
        True,
        "rollout.router_replay true needs rollout.prefix_caching false",
    ),
    ("rollout.max_new_tokens", 4096, "has 512 positions"),
    (
        "learner.micro_batch_tokens",
        10,
        "learner.micro_batch_tokens 10 is less than one longest sequence",
    ),
    ("learner.mini_batches", 100, "learner.mini_batches 100 is more than rollout.prompts 64"),
    (
        "learner.optimizer.warmup_steps",
        50,
        "are more than steps 40, so the learning rate would never be reached",
    ),
    ("learner.objective.name", "ppo", "name 'ppo' is not an objective"),
    ("learner.objective.clip_low", 0.2, "'clip_low' is an option of grpo"),
    ("learner.kl", {"coefficient": 0.1}, "'coefficient' is an option of k1, k2, k3"),
    ("eval.samples", 4, "eval.samples 4 with eval.temperature 0"),
    ("task.reward", "exactly", "reward 'exactly' must read file.py:function"),
    ("task.correct", "reward.py:corect", "has no function 'corect'; did you mean 'correct'?"),
    ("task.options", {"min_terms": 2}, "takes no options, got: min_terms"),
    (
        "task.template",
        {"enable_thinking": False},
        "task.template.enable_thinking False has no effect",
    ),
    ("task.subset", "main", "task.subset 'main' names part of a Hugging Face data set"),
    ("log", "wandbb", "log 'wandbb' must be 'none' or 'wandb'"),
]


@pytest.mark.parametrize(("path", "value", "said"), FAULTS_OF_CONFIGURATION)
def test_a_fault_of_the_configuration_is_named(
    folder: Path, capsys, path: str, value: Any, said: str
):
    set_field(path, value)
    assert said in said_of(capsys)


def changed(**values: Any) -> Callable[[list[Tree]], list[Tree]]:
    """Return a function that gives the second row other values; None removes a column."""
    return lambda rows: [
        {k: v for k, v in {**row, **values}.items() if v is not None} if number == 1 else row
        for number, row in enumerate(rows)
    ]


QUESTIONS: dict[str, tuple[Callable[[list[Tree]], list[Tree]], str]] = {
    "no questions": (lambda rows: [], "task file questions.jsonl is empty"),
    "none to train on": (lambda rows: rows[4:], "has no train questions"),
    "none held out": (lambda rows: rows[:4], "has no heldout questions"),
    "in both splits": (
        lambda rows: [*rows, {**rows[0], "split": "heldout"}],
        "is in both splits",
    ),
    "all too long": (
        lambda rows: [{**r, "question": r["question"] * 9} for r in rows],
        "longer than rollout.max_pr",
    ),
    "answers too long": (
        lambda rows: [{**r, "answer": "12345678 " * 9} for r in rows],
        "which 4 of 4 exceed",
    ),
}
FAULTS_OF_SECOND_ROW = {
    "no question": [{"question": None}, "questions.jsonl:2: no column 'question'"],
    "another name": [{"question": None, "qestion": "1 + 1 ="}, "did you mean 'qestion'?"],
    "an empty question": [{"question": " "}, "questions.jsonl:2: 'question' is empty"],
    "a number for a question": [
        {"question": 7},
        "questions.jsonl:2: 'question' must be text, or a list",
    ],
    "a turn of no role": [
        {"question": [{"role": "human", "content": "x"}]},
        "of role system, user, assistant",
    ],
    "the assistant last": [
        {"question": [{"role": "assistant", "content": "x"}]},
        "must be the user's",
    ],
    "no answer": [{"answer": None}, "questions.jsonl:2: no column 'answer'"],
    "an empty answer": [
        {"answer": ""},
        "questions.jsonl:2: 'answer' must be text that is not empty",
    ],
    "a fraction": [
        {"answer": 0.5},
        "questions.jsonl:2: 'answer' must be text that is not empty, or a whole",
    ],
    "a list of answers": [{"answer": ["1", "2"]}, "questions.jsonl:2: 'answer' must be text"],
    "an unknown split": [
        {"split": "test"},
        "questions.jsonl:2: unknown split 'test'; allowed: train, heldout",
    ],
}


QUESTIONS |= {
    name: (changed(**values), said) for name, (values, said) in FAULTS_OF_SECOND_ROW.items()
}


@pytest.mark.parametrize(("change", "said"), QUESTIONS.values(), ids=QUESTIONS)
def test_a_fault_of_the_questions_is_named(
    folder: Path, capsys, change: Callable[[list[Tree]], list[Tree]], said: str
):
    save(change([json.loads(line) for line in Path("questions.jsonl").read_text().splitlines()]))
    assert said in said_of(capsys)


FAULTS_OF_REWARD = {
    "def reward(problem, text): raise ValueError('odd')": "raised ValueError: odd",
    "def reward(problem, text): return '1'": "returned '1' (str); a reward must be a finite number",
    "def reward(problem, text): return float('nan')": (
        "returned nan (float); a reward must be a finite number"
    ),
    "def reward(problem, answer): return 1.0": "are of no kind of reward that is known",
    "def reward(problem, text, extra): return 1.0": (
        "have 'extra', which a reward of qarl's kind is not given"
    ),
    "def reward(completions, **columns): return [1.0] * 9": (
        "returned a list of 9 for 2 completions"
    ),
    "import nowhere": ("importing it raised ModuleNotFoundError: No module named 'nowhere'"),
    "def reward(:": "SyntaxError: invalid syntax",
}


@pytest.mark.parametrize(("code", "said"), FAULTS_OF_REWARD.items())
def test_a_fault_of_the_reward_is_named(folder: Path, capsys, code: str, said: str):
    Path("reward.py").write_text(code)
    set_field("task.reward", "reward.py:reward")
    assert said in said_of(capsys)


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (
        lambda model: (model / "tokenizer.json").unlink(),
        "has no tokenizer",
    ),
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(),
        "has no weights",
    ),
    "a tensor short": (
        lambda model: save_file(
            dict([*load_file(file := model / "model.safetensors").items()][1:]), file
        ),
        "'model.embed_tokens.weight', which its config.json asks for",
    ),
    "a template that raises": (
        lambda model: (model / "chat_template.jinja").write_text(
            "{{ raise_exception('no user') }}"
        ),
        "cannot be applied: TemplateError: no user",
    ),
    "no end": (
        lambda model: [
            f.write_text(f.read_text().replace('"eos_token', '"x'))
            for f in model.glob("*config.json")
        ],
        (
            "warning: end: neither tokenizer nor config.json has an EOS token, so every completion"
            " is cut off -> set eos_token_id in config.json, or give --rollout.stop TEXT"
        ),
    ),
}


@pytest.mark.parametrize(("damage", "said"), MODELS.values(), ids=MODELS)
def test_a_fault_of_the_model_is_named(
    folder: Path, capsys, damage: Callable[[Path], object], said: str
):
    shutil.copytree(yaml.safe_load(Path("run.yaml").read_text())["model"], "model")
    set_field("model", "./model")
    damage(Path("model"))
    assert said in said_of(capsys)


CHECK_OPTIONS = {
    "as-written": "",
    "one-token": "--rollout.max_new_tokens 1",
    "exact-reward": "--task.correct exact --task.reward exact",
    "system-prompt": "--task.system 'Add.' --prompts 2",
    "answer-is-the-question": "--task.answer question --rollout.max_new_tokens 10",
}


@pytest.mark.parametrize("name", CHECK_OPTIONS)
def test_findings_of_check_are_those_expected(folder: Path, name: str):
    """Contract: level, subject, text and remedy of each finding, and the exit status. Findings
    about the machine, or that name the model's folder, are left out.
    """
    options = CHECK_OPTIONS[name]
    status = main(["check", "run.yaml", "--json", "check.json", *shlex.split(options)])
    findings = [Finding(**each) for each in json.loads(Path("check.json").read_text())]
    lines = [f"qarl check run.yaml {options}"]
    for finding in findings:
        if finding.about not in ("model", "kernels", "memory", "disk"):
            lines += finding_lines(finding)
    assert_expected(__file__, f"check-{name}", [*lines, f"exit status {status}"])


HEALTHY_FINDINGS = [
    "kernels: w4a16 in bfloat16: ",
    "task: questions.jsonl: 2560 rows; 2304 to train on, 256 held out",
    "as the model sees it (",
    "  | <|im_start|>user\n  | State the final answer",
    "reference answer: ",
    "reward 1, counts as right",
    "a wrong answer: ",
    "that in a box: ",
    "reward 0, counts as wrong",
    "64 allowed",
    "memory: ",
    " free at ",
    "all well",
]


def test_init_writes_what_is_healthy(starter: Path, capsys: pytest.CaptureFixture[str]):
    """Contract: every file is commented, the questions are split, and check has nothing to say
    against them.
    """
    assert sorted(path.name for path in starter.iterdir()) == sorted(FILES)
    assert "#" in (starter / "run.yaml").read_text()
    assert ast.get_docstring(ast.parse((starter / "reward.py").read_text()))
    capsys.readouterr()
    assert main(["check", "run.yaml", "--task.system", "Be brief."]) == 0
    text = capsys.readouterr().out
    for part in HEALTHY_FINDINGS:
        assert part in text, part


JUDGES = [
    ("reward", "warning: reward: gives the reference answer no more than a wrong one"),
    ("correct", "warning: accuracy: does not tell the reference answer from a wrong one"),
]


@pytest.mark.parametrize(("field", "said"), JUDGES)
def test_a_judge_that_tells_nothing_is_a_warning(starter: Path, capsys, field: str, said: str):
    (starter / "same.py").write_text("def same(problem, text):\n    return 0\n")
    for name, value in {"correct": "exact", field: "same.py:same"}.items():
        set_field(f"task.{name}", value)
    assert main(["check", "run.yaml"]) == 1
    text = capsys.readouterr().out
    assert said in text and text.endswith("1 warning\n"), text
    for form in ("'box' in text", "-len(text)", "sum(map(ord, text)) % 7")[
        : 1 if field == "correct" else 3
    ]:
        (starter / "same.py").write_text(f"def same(problem, text):\n    return {form}\n")
        assert main(["check", "run.yaml"]) == (field == "correct"), (
            "of the form alone: no verdict, but a reward"
        )


def test_the_starters_reward_is_what_it_says(starter: Path):
    task = load_task(load_config(starter / "run.yaml", {}).task)
    (problem,) = task.problems("heldout", 0, 1, 0)
    near = str(int(problem.answer) + 1)
    said = [
        *((problem, text) for text in (problem.answer, near, "many")),
        (replace(problem, metadata={}), near),
    ]
    responses = [Response(*each) for each in said]
    assert task.rewards(responses) == [1.0, 0.5, 0.0, 0.0]
    assert task.correct(responses) == [
        True,
        *[False] * 3,
    ]
