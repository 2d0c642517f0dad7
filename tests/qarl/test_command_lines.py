"""Command lines: what they come to, or why they are refused, before anything is loaded.

Which options there are is held to docs/reference/ (test_docs.py), what `--help` prints to
test_help.py. Here stands the parsing, and tables that commands print.
"""

import shlex
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from qarl.cli import train as cli
from qarl.cli.main import main
from qarl.cli.mismatch import show
from qarl.cli.options import text_width
from qarl.cli.runs import _age
from qarl.cli.schemes import SchemeRow, _show, checkpoint_bytes
from qarl.configs.load import default_config, load_config
from qarl.embedded.recipe import RECIPES, recipe_config
from qarl.quant.checkpoint.load import empty_model
from qarl.quant.schemes import SCHEMES
from qarl.report.finding import Finding

ACCEPTED: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("--lr -1e-3", {"learner.optimizer.lr": "-1e-3"}, {}),
    ("--lr=-.5", {"learner.optimizer.lr": "-.5"}, {}),
    ("--lr -inf", {"learner.optimizer.lr": "-inf"}, {}),
    ("--rollout.top_p", {"rollout.top_p": ""}, {}),
    ("--steps=7 --model a/b", {"model": "a/b", "steps": "7"}, {}),
    (
        '--rollout.top_p=0.9 --task.system "a b"',
        {"rollout.top_p": "0.9", "task.system": "a b"},
        {},
    ),
    ("--resume a --config b", {}, {"config": "b", "resume": "a"}),
    ("--a.b", {"a.b": ""}, {}),
    ("--resume a --output b", {"output": "b"}, {"resume": "a"}),
    ("--max_steps 7", {"max_steps": "7"}, {}),
    ("--num_generations 4", {"num_generations": "4"}, {}),
    ("--temperature 1", {"temperature": "1"}, {}),
    ('--task.options "{a: 1}"', {"task.options": "{a: 1}"}, {}),
    ("--from-rollouts a --config b", {"from_rollouts": "a"}, {"config": "b"}),
    ("--seed 3 --dry-run --steps 2", {"steps": "2", "seed": "3"}, {"dry_run": True}),
    ("--steps 2.5", {"steps": "2.5"}, {}),
    ("--no-such.field 1", {"no-such.field": "1"}, {}),
    ("--scheme w4a17", {"scheme": "w4a17"}, {}),
]
"""Options of `qarl train` → overrides of the configuration, and the command's own options that are
set. Values are checked later, with the configuration: 2.5 steps pass here.
"""

REFUSED = [
    (
        "check --machine --sample",
        (
            "configuration: --sample with --machine, which looks at the machine alone; omit one of"
            " them"
        ),
    ),
    (
        "check --machine tiny-qwen3",
        (
            "configuration: tiny-qwen3 with --machine, which looks at the machine alone; omit one"
            " of them"
        ),
    ),
    (
        "check --machine --steps 2",
        (
            "configuration: --steps with --machine, which looks at the machine alone; omit one of"
            " them"
        ),
    ),
    (
        "compare",
        "configuration: nothing to compare; give a YAML file, a shipped name (baselines, ",
    ),
    (
        "compare --vary a",
        "usage: --vary 'a' must be an option and two values or more, such as scheme=bf16,w4a16",
    ),
    ("compare --workers 0", "usage: --workers '0' must be a whole number from 1 up"),
    (
        "compare --vary steps=1,2 --vary steps=3,4",
        "configuration: --vary steps is given twice, with 1,2 and 3,4",
    ),
    (
        "compare --seeds 1,1 ptq",
        (
            "usage: --seeds '1,1' must be different whole numbers from 0 up with commas between,"
            " such as 0,1,2"
        ),
    ),
    (
        "compare --seeds a",
        (
            "usage: --seeds 'a' must be different whole numbers from 0 up with commas between, such"
            " as 0,1,2"
        ),
    ),
    ("eval x --suite y", "usage: --suite 'y' must be one of math"),
    (
        "eval x --data y",
        "configuration: --data y goes with --suite, whose copies it holds; omit it",
    ),
    ("eval x --problems 0", "configuration: --problems 0 must be at least 1"),
    (
        "eval runs/a",
        (
            "configuration: there is no folder 'runs/a' here; give a run's, a checkpoint's, or an"
            " id on the Hub (owner/name)"
        ),
    ),
    (
        "eval x --task.rewards 1",
        "configuration: unknown option --task.rewards; did you mean --reward (task.reward)?",
    ),
    ("eval x --seed -1", "usage: --seed '-1' must be a whole number from 0 up"),
    ("export a", "usage: qarl export needs -o/--output"),
    (
        "export a -o b --scheme c",
        "configuration: there is no folder 'a'; give a run's, by default one of runs/",
    ),
    ("init", "usage: qarl init needs DIR"),
    (
        "init a --gpus 1x24GB",
        "configuration: --gpus 1x24GB goes with --model, the model that is to fit them",
    ),
    (
        "mismatch --page a/b",
        "configuration: --page a/b: there is no folder 'a'; make it first, or name another",
    ),
    (
        "plan --gpus 8xP100",
        (
            "configuration: --gpus '8xP100': give a count and a kind, such as 8xH100, or 1x24GB;"
            " known are "
        ),
    ),
    (
        "plan --gpus 2x80GB --processes 3 --model qwen3-8b",
        "configuration: --processes 3, but 2 × 80 GB has 2; one process takes one GPU",
    ),
    ("plan --processes 0", "usage: --processes '0' must be a whole number from 1 up"),
    (
        "plan --json a/b",
        "usage: --json a/b: 'a' cannot be written to; name a file elsewhere",
    ),
    (
        "report a -o b/c.html",
        "configuration: -o b/c.html: there is no folder 'b'; make it first, or name another",
    ),
    (
        "runs none",
        "configuration: there is no run in 'none'; name the folder that run folders are in",
    ),
    (
        "runs",
        "configuration: there is no run in 'runs'; name the folder that run folders are in",
    ),
    ("sample a", "usage: qarl sample needs QUESTION"),
    (
        "schemes --dtype half",
        "usage: --dtype 'half' must be one of bfloat16, float16, float32",
    ),
    (
        "serve a b",
        "configuration: unexpected argument 'b'; this command's --help lists what it takes",
    ),
    ("tasks non", "task: unknown task 'non'; it must be one of "),
    (
        "tasks a/b.json",
        (
            "task: task 'a/b.json' is not a built-in one; a file of questions is a .jsonl, .csv,"
            " .tsv or .parquet, and a Hugging Face data set, or a folder with one, reads"
            " hf:a/b.json; a list becomes lines by: jq -c '.[]' a/b.json > a/b.jsonl"
        ),
    ),
    ("train --lr", "usage: option --lr needs a value"),
    ("train --lr=", "usage: --lr is empty; give it a value or omit it"),
    (
        "train --lr 1 --lr 2",
        "usage: option --lr is given twice, the second time with '2'; give it once",
    ),
    (
        "train --lr 1 --learner.optimizer.lr 2",
        (
            "configuration: --learner.optimizer.lr 2 is also given by its short flag, with '1';"
            " give it once, by either"
        ),
    ),
    ("train --stpes 3", "usage: unknown option --stpes; did you mean '--steps'?"),
    (
        "train --learner.optimizer.lr 2 --learner.optimizer.lr 3",
        (
            "configuration: option --learner.optimizer.lr is given twice, with '2' and '3'; give it"
            " once"
        ),
    ),
    (
        "train --rollout.top_p 0.9 x",
        "configuration: unexpected argument 'x'; options read --name VALUE",
    ),
    (
        "train --processes two",
        "usage: --processes 'two' must be a whole number from 1 up",
    ),
    (
        "train --processes -1 --dry-run",
        "usage: --processes '-1' must be a whole number from 1 up",
    ),
    ("train --dry-run=1", "usage: option --dry-run takes no value"),
    (
        "train --config a --config b",
        "usage: option --config is given twice, the second time with 'b'; give it once",
    ),
    (
        "train mine.yaml",
        (
            "configuration: unexpected argument 'mine.yaml'; options read --name VALUE; a"
            " configuration is --config mine.yaml"
        ),
    ),
    (
        "train mine",
        "configuration: unexpected argument 'mine'; options read --name VALUE",
    ),
    ("train --task --steps", "usage: option --task needs a value"),
    (
        "train -- --x",
        "configuration: unexpected argument '--'; this command's --help lists what it takes",
    ),
    (
        "train --layers a=b --layers c=d",
        "usage: option --layers is given twice, the second time with 'c=d'; give it once",
    ),
    (
        "train -V x",
        "configuration: unexpected argument '-V'; options read --name VALUE",
    ),
    ("trian", "usage: COMMAND 'trian' must be one of train, sft, check, "),
]
"""Command lines → how their one line of an error begins."""


@pytest.mark.parametrize(("line", "overrides", "own"), ACCEPTED, ids=[row[0] for row in ACCEPTED])
def test_options_of_train_become_overrides(
    line: str, overrides: dict[str, str], own: dict[str, Any]
):
    with patch.object(cli, "_train", return_value=0) as train:
        assert main(["train", *shlex.split(line)]) == 0
    known = train.call_args.args[0]
    assert known.overrides == overrides
    unset = {
        "config": None,
        "resume": None,
        "processes": None,
        "dry_run": False,
        "to_vllm": [],
    }
    assert {name: getattr(known, name) for name in unset} == unset | own


@pytest.mark.parametrize(("line", "error"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_wrong_command_line_is_refused_in_one_line(
    line: str,
    error: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
    monkeypatch: Any,
):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(error)
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_and_version_ignore_what_follows(capsys: pytest.CaptureFixture[str]):
    assert main(["help"]) == 0
    assert main(["version", "x"]) == 0
    assert capsys.readouterr().err == ""


SCHEME_ROWS = [
    SchemeRow("s0", "w", "a", "f", None, None, "", "k", ""),
    SchemeRow("s1", "w", "a", "f", 1 / 3, 2**29, "", "k", "scheme 'b': too old. Else"),
    SchemeRow("s2", "w", "a", "f", 2 / 3, 2**30, "odd", "", "no (vLLM has it for GPUs)"),
    SchemeRow(
        "s3",
        "w",
        "a",
        "f",
        1.0,
        3 * 2**29,
        "",
        "",
        "word " * 20,
    ),
]
"""Schemes that run, run for another reason, do not divide the layers, and do not run."""


def test_the_table_of_schemes_says_which_run_here_and_why_others_do_not(
    capsys: pytest.CaptureFixture[str],
):
    _show(Console(width=100), SCHEME_ROWS, None, False)
    assert capsys.readouterr().out.splitlines() == [
        "bytes per parameter: a layer of 4096×4096, scales included",
        "scheme  weights  activations  bytes/param  runs  why not",
        "s0      w        a                      -  yes",
        "s1      w        a                 0.3333  yes   scheme 'b'",
        "s2      w        a                 0.6667  no    odd",
        "s3      w        a                 1.0000  no    " + "word " * 11 + "…",
        "runs: whether on this machine, in learner and engine; kernels and reasons in full with -v",
        "the layer does not fit s2; take one that does and runs here: s0, s1",
    ]


def test_the_verbose_table_of_a_model_has_kernels_and_whole_reasons(
    capsys: pytest.CaptureFixture[str],
):
    _show(Console(width=100), SCHEME_ROWS[:3], "m", True)
    assert capsys.readouterr().out.splitlines() == [
        "bytes per parameter: the layers of m, scales included",
        "scheme  weights  activations  bytes/param  checkpoint  kernel",
        "s0      w        a                      -           -  k",
        "s1      w        a                 0.3333  512.00 MiB  k",
        "s2      w        a                 0.6667    1.00 GiB  -",
        "s1: not here: scheme 'b': too old. Else",
        "s2: odd",
        "s2: not here: no (vLLM has it for GPUs)",
        "m does not fit s2; take one that does and runs here: s0, s1",
    ]


def test_findings_are_shown_with_their_remedy(capsys: pytest.CaptureFixture[str]):
    findings = [
        Finding("warning", "about", "text", "do"),
        Finding("note", "", "two\nlines"),
    ]
    show(findings, Console(width=100))
    expected = ["warning: about: text", "  -> do", "", "  | two", "  | lines"]
    assert capsys.readouterr().out.splitlines() == expected


PAPERS = "settings not given are the paper's: --config paper/qwen3-8b-base"


@pytest.mark.parametrize(
    ("file", "resume", "model", "task", "more"),
    [
        (None, None, "tiny-qwen3", "math", []),
        (
            None,
            None,
            "a/b",
            "math",
            [f"{PAPERS}; task math, the paper's (another: --task)"],
        ),
        (None, None, "a/b", "t", [PAPERS]),
        ("paper/qwen3-8b-base", None, "a/b", "t", []),
        (None, "runs/a", "a/b", "t", []),
    ],
)
def test_a_run_says_where_its_settings_are_from(
    file: str | None,
    resume: str | None,
    model: str,
    task: str,
    more: list[str],
    capsys: pytest.CaptureFixture[str],
):
    config = load_config(default_config(model), {"model": model, "task.name": task})
    command = cli._Command(config=config, file=file, overrides={}, processes=None, arguments=())
    with patch.object(cli, "VERSION", "1.0"):
        cli._say_begun(command, Console(width=100), new=resume is None)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"qarl 1.0: {model}, w4a16, bfloat16, {config.steps} steps"
    assert rest == more


def test_ages_of_runs_are_rounded_to_their_largest_unit():
    seconds = [-1, 0, 59, 60, 89, 91, 3599, 3600, 86399, 86400, 10**6]
    assert [_age(number) for number in seconds] == [
        *("0 s", "0 s", "59 s"),
        *("1 min", "1 min", "2 min", "60 min"),
        *("1 h", "24 h", "1 d", "12 d"),
    ]


def test_text_is_as_wide_as_the_terminal_between_50_and_120_columns():
    columns = (10, 50, 51, 119, 120, 300)
    assert [text_width(number) for number in columns] == [50, 50, 51, 119, 120, 120]


@pytest.mark.parametrize(
    ("scheme", "of_a_layer", "of_a_mixture"),
    [
        ("bf16", 2, 1_906_176),
        ("w4a16", 0.5 + 2 / 128 + 16 / 4096**2, 593_792),
        ("w8a8", 1 + 2 / 4096, 1_035_264),
        ("fp8", 1 + 2 / 4096, 1_035_264),
        ("w4a16-channel", 0.5 + 2 / 4096 + 16 / 4096**2, 593_792),
    ],
)
def test_bytes_of_a_checkpoint(scheme: str, of_a_layer: float, of_a_mixture: int):
    """Codes, scales of two bytes for each group of a row, and the shape of packed codes, 16
    bytes. The tiny mixture's rows are shorter than a group, so w4a16 has one scale a row there.
    """
    assert checkpoint_bytes(SCHEMES[scheme], None, 2) == (
        pytest.approx(of_a_layer),
        None,
    )
    mixture = empty_model(recipe_config(RECIPES["tiny-qwen3-moe"]))
    assert checkpoint_bytes(SCHEMES[scheme], mixture, 2)[1] == of_a_mixture


def test_a_task_without_options_to_choose_has_an_example(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["tasks", "lookup_sum"]) == 0
    printed = capsys.readouterr().out
    assert "min_terms [4]  Fewest names of a sum" in printed
    assert "question:\n  Look up and add: 76 83 45 29\nanswer:\n  19\n" in printed
    assert printed.endswith("train on it: qarl train --task lookup_sum\n")


def test_a_task_that_needs_options_says_which(capsys: pytest.CaptureFixture[str]):
    assert main(["tasks", "composite"]) == 0
    printed = capsys.readouterr().out
    assert "datasets [None]" in printed
    assert "no example without options" in printed
    assert "Must specify at least one dataset" in printed
