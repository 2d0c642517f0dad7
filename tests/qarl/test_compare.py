"""`qarl compare`: which cells there are, what is refused before the first, how metrics become
figures and figures a table; two variants with two seeds are trained for real, and go on after one
was killed.
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from qarl.cli.main import main
from qarl.compare import file as files
from qarl.compare.cells import _environment, run_cells
from qarl.compare.commands import commands_left
from qarl.compare.comparison import Cell, Comparison, Figure, Quantized
from qarl.compare.figures import Measured, gap_closed, remarks, rows, table, value_of
from qarl.compare.file import ComparisonFile, make_comparison, read_comparison
from qarl.configs.load import choice_sections
from qarl.configs.schema.run import RunConfig
from tests.support import forks

SMALL = [
    "--steps",
    "2",
    "--prompts",
    "8",
    "--samples",
    "4",
    "--mini-batches",
    "1",
    "--eval.problems",
    "16",
    "--eval-every",
    "2",
    "--checkpoint-every",
    "1",
]


def shipped(name: str, output: Path = Path("runs"), **chosen: Any) -> Comparison:
    return make_comparison(read_comparison(name), output, chosen.pop("options", {}), **chosen)


def left(comparison: Comparison) -> dict[Cell, list[list[str]]]:
    return {cell: commands_left(comparison, cell) for cell in comparison.cells()}


def configs(comparison: Comparison) -> dict[str, RunConfig]:
    """Return the first seed's configurations by variant."""
    return {
        each.name: comparison.run_config(Cell(each, comparison.seeds[0]))
        for each in comparison.variants
    }


@pytest.mark.parametrize("name", files.shipped_comparisons())
def test_every_shipped_file_gives_configurations(name: str):
    """All fields of `qarl train`, and within a variant what its quantization takes."""
    comparison = shipped(name)
    assert len(configs(comparison)) > 2
    assert all(config.export and config.output for config in configs(comparison).values())


def test_one_run_of_everything_before_the_next_seed():
    """Variants that set a varied option stay one; comparisons are within what is varied; quantized
    ones come last.
    """
    comparison = shipped(
        "ptq",
        vary={"scheme": ("w4a16", "w8a8")},
        variants=("bf16", "rtn", "qarl"),
        seeds=(0, 1),
    )
    names = [cell.name for cell in comparison.cells()]
    assert names == [
        *(
            "bf16-seed0",
            "qarl-w4a16-seed0",
            "qarl-w8a8-seed0",
            "bf16-seed1",
            "qarl-w4a16-seed1",
            "qarl-w8a8-seed1",
        ),
        *("rtn-w4a16-seed0", "rtn-w8a8-seed0", "rtn-w4a16-seed1", "rtn-w8a8-seed1"),
    ]
    rtn = next(each for each in comparison.variants if each.name == "rtn-w8a8")
    assert rtn.reference == "qarl-w8a8"
    assert rtn.quantized == Quantized("bf16", "rtn", None)
    assert comparison.run_config(Cell(rtn, 0)).scheme == "w8a8"
    schemes = {each.name: each for each in shipped("schemes").variants}
    assert schemes["qarl-grpo"].reference == "bf16-grpo"
    assert schemes["qarl-grpo"].baseline == "plain-grpo"


def test_what_differs_between_runs_is_what_is_compared():
    """All objectives' configurations are equal once objective, its correction and
    aggregation, and on_policy's one update a batch are set aside; of the pairings, once what
    computes is.
    """
    objectives = configs(shipped("objectives", seeds=(3,)))
    names = {name for part in choice_sections()["learner.objective"] for name in part.names()}
    assert set(objectives) == names - {"own"}
    assert {config.seed for config in objectives.values()} == {3}
    assert objectives["gspo"].learner.objective.model_dump()["clip_high"] == 0.1, (
        "what the file has for TBPO"
    )
    pairings = configs(shipped("precision-gap"))
    for group, parts in (
        (objectives, ("objective", "correction", "aggregation", "mini_batches")),
        (
            pairings,
            ("aligned", "compute_dtype", "operators", "ratio_fix", "master_dtype"),
        ),
    ):
        trees = [
            config.model_dump(exclude={"output", "scheme", "dtype"}) for config in group.values()
        ]
        for tree in trees:
            for part in parts:
                del tree["learner"][part]
        assert all(tree == trees[0] for tree in trees)


def test_options_hold_for_variants_that_do_not_set_them():
    """Also the file's own; how codes are made passes unquantized runs by, which have none."""
    options = {"scheme": "w8a8", "steps": "7", "quantization.scale": "kept"}
    schemes = configs(shipped("schemes", options=options))
    assert {name: config.scheme for name, config in schemes.items()} == {
        **dict.fromkeys(("bf16-tbpo", "bf16-grpo"), "bf16"),
        **dict.fromkeys(("plain-tbpo", "plain-grpo", "qarl-tbpo", "qarl-grpo"), "w8a8"),
    }
    assert {config.steps for config in schemes.values()} == {7}
    scales = [config.quantization.scale for config in schemes.values()]
    assert scales == ["minmax"] * 2 + ["kept"] * 4
    file = files.varied({"scheme": ("bf16", "w4a16"), "learner.optimizer.lr": ("1e-4", "5e-4")})
    product = configs(make_comparison(file, Path("runs"), {}, config="immediate-eos"))
    assert [*product] == [
        "bf16-lr-1e-4",
        "bf16-lr-5e-4",
        "w4a16-lr-1e-4",
        "w4a16-lr-5e-4",
    ]
    assert product["bf16-lr-5e-4"].learner.optimizer.lr == 5e-4
    assert product["bf16-lr-5e-4"].rollout.prompts == 32


OPTION_TEXTS = [
    pytest.param(
        {
            "learner": {"aligned": False, "optimizer": {"lr": 0.0005}},
            "task": {"options": {"min_terms": 2}},
        },
        {
            "learner.aligned": "false",
            "learner.optimizer.lr": "0.0005",
            "task.options": '{"min_terms": 2}',
        },
        id="learner-aligned-false-optimizer",
    ),
    pytest.param(
        {"aligned": True, "layers": ["first:1=bf16"]},
        {"learner.aligned": "true", "layers": '["first:1=bf16"]'},
        id="aligned-true-layers-first",
    ),
]


@pytest.mark.parametrize(("tree", "texts"), OPTION_TEXTS)
def test_options_are_written_as_in_a_configuration_or_on_the_command_line(
    tree: dict[str, Any], texts: dict[str, str]
):
    assert files.option_texts(tree) == texts


REFUSED_COMMANDS = [
    pytest.param(
        None,
        "",
        "nothing to compare; give a YAML file, a shipped name (baselines, objectives,",
        id="nothing-to-compare-give",
    ),
    pytest.param(
        None,
        "shemes",
        "no comparison file 'shemes', and no shipped one of that name",
        id="no-comparison-file-shemes",
    ),
    pytest.param(
        None,
        "--vary scheme",
        "'scheme' must be an option and two values or more, such as scheme=bf16,w4a16",
        id="scheme-must-be-an",
    ),
    pytest.param(
        None,
        "--vary schem=bf16,w4a16",
        "bf16-seed0: unknown option --schem; did you mean --scheme?",
        id="bf16-seed0-unknown-option",
    ),
    pytest.param(
        None,
        "--vary scheme=bf16,w4a61",
        "w4a61-seed0: unknown scheme 'w4a61'",
        id="w4a61-seed0-unknown-scheme",
    ),
    pytest.param(
        None,
        "--vary scheme=bf16,w4a16 --seed 1",
        "seed is chosen by the comparison: every variant is run with",
        id="seed-is-chosen-by",
    ),
    pytest.param(
        None,
        "schemes --seeds 1,1",
        "--seeds '1,1' must be different whole numbers from 0 up",
        id="seeds-1-1-must",
    ),
    pytest.param(
        None,
        "schemes --variants qrl",
        "variant 'qrl' must be one of bf16, plain, qarl; did you mean 'qarl'?",
        id="variant-qrl-must-be",
    ),
    pytest.param(
        None,
        "objectives --objective tbpo",
        "every variant sets learner.objective.name itself",
        id="every-variant-sets-learner.objective.name",
    ),
    pytest.param(
        None,
        "ptq --variants qarl,rtn",
        "variant 'rtn': of 'bf16' must be a variant that is trained and compared",
        id="variant-rtn-of-bf16",
    ),
    pytest.param(
        None,
        "ptq --scheme w8a8",
        "awq-seed0: method 'awq' is for weight-only int4 schemes, not for 'w8a8'",
        id="awq-seed0-method-awq",
    ),
    pytest.param(None, "ptq --rollout.max_prompt_tokens 4", "bf16-seed0: ", id="bf16-seed0"),
    pytest.param(
        {"seed": [0]}, "", "unknown key 'seed'; did you mean 'seeds'?", id="unknown-key-seed-did"
    ),
    pytest.param({"seeds": []}, "", "seeds [] must hold at least one", id="seeds-must-hold-at"),
    pytest.param({"reference": "c"}, "", "variant 'c' must be one of a, b", id="variant-c-must-be"),
    pytest.param(
        {"figures": {"x": "reward lst 3"}},
        "",
        "'reward lst 3' must be METRIC mean, METRIC first N",
        id="reward-lst-3-must",
    ),
    pytest.param(
        {"evaluate": {"temprature": 1}},
        "",
        "'temprature' must be one of suite, data",
        id="temprature-must-be-one",
    ),
    pytest.param(
        {"variants": ["a"]}, "", "variants: ['a'] must be named options", id="variants-a-must-be"
    ),
    pytest.param(
        {"variants": {"a": "w4a16"}},
        "",
        "variants: a 'w4a16' must be options",
        id="variants-a-w4a16-must",
    ),
    pytest.param(
        {"variants": {"a": {"of": "b"}}},
        "",
        "a-seed0: unknown option --of",
        id="a-seed0-unknown-option",
    ),
    pytest.param(
        {"variants": {"a": {"ptq": "rtn", "of": "a", "steps": 3}}},
        "",
        "variant 'a' sets steps, but it is quantized",
        id="variant-a-sets-steps",
    ),
]


@pytest.mark.parametrize(("body", "arguments", "said"), REFUSED_COMMANDS)
def test_what_is_refused_before_the_first_run(
    body: dict[str, Any] | None, arguments: str, said: str, tmp_path, capsys
):
    command = ["compare", *arguments.split(), "--output", str(tmp_path / "runs")]
    if body is not None:
        (tmp_path / "mine.yaml").write_text(
            json.dumps({"variants": {"a": {"scheme": "bf16"}, "b": {}}} | body)
        )
        command.insert(1, str(tmp_path / "mine.yaml"))
    assert main(command) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "runs").exists()


def test_figures_skip_steps_that_learned_nothing():
    """Contract: only steps that measured a figure count; the first step here did not learn."""
    steps = [
        {"step": n, "reward": n - 3.0, **({"learn/k3": 0.1 * n} if n > 1 else {})}
        for n in range(1, 13)
    ]
    values = {
        text: value_of(Figure.parse("x", text), steps)
        for text in (
            "reward last 10",
            "learn/k3 mean",
            "learn/k3 first 1",
            "reward reaches 0.5",
            "reward reaches 99",
            "x mean",
        )
    }
    assert [*values.values()] == [
        pytest.approx(4.5),
        pytest.approx(0.7),
        pytest.approx(0.2),
        4,
        None,
        None,
    ]


def test_the_gap_that_is_closed():
    assert gap_closed({0: 0.70}, {0: 0.60}, {0: 0.72}) == pytest.approx(0.10 / 0.12)
    assert gap_closed({0: 0.7, 1: 0.5}, {0: 0.6}, {0: 0.8, 1: 0.9}) == pytest.approx(0.5), (
        "shared seeds alone"
    )
    assert gap_closed({0: 0.7}, {0: 0.8}, {0: 0.7}) is None, "the baseline does not trail"
    assert gap_closed({0: 0.7, 1: 0.7}, {0: 0.6, 1: 0.71}, {0: 0.7, 1: 0.7}) is None, (
        "nor by more than seeds differ"
    )


def measured(accuracy: float, device: str = "CPU", moved: float | None = None) -> Measured:
    figures = {} if moved else {"k3": 1e-3 * accuracy, "steps": 7.0 if accuracy > 0.72 else None}
    environment = {} if moved else {"torch": "2", "device": device}
    return Measured(
        accuracy=accuracy,
        evaluated=None,
        moved=moved,
        figures=figures,
        curves={},
        environment=environment,
    )


def test_the_table():
    accuracies = {
        "bf16": (0.8, 0.7),
        "plain": (0.6, 0.5),
        "qarl": (0.75, 0.7),
        "rtn": (0.5, 0.6),
    }
    file = ComparisonFile(
        variants={
            "bf16": {"scheme": "bf16"},
            "plain": {"aligned": False},
            "qarl": {},
            "rtn": {"ptq": "rtn", "of": "bf16"},
        },
        reference="bf16",
        baseline="plain",
    )
    comparison = make_comparison(file, Path("runs"), {}, seeds=(0, 1))
    cells = {
        cell: measured(
            accuracies[cell.variant.name][cell.seed],
            moved=0.25 if cell.variant.quantized else None,
        )
        for cell in comparison.cells()
    }
    bf16, plain, qarl, rtn = rows(cells)
    assert bf16["to_reference"] is None
    assert plain["to_baseline"] is None
    assert plain["gap_closed"] is None
    assert qarl["to_reference"]["mean"] == pytest.approx(-0.025)
    assert qarl["to_reference"]["low"] == pytest.approx(-0.05)
    assert qarl["deployed"]["error"] == pytest.approx(0.025)
    assert qarl["gap_closed"] == pytest.approx(0.175 / 0.2)
    assert qarl["accuracies"] == {0: 0.75, 1: 0.7}
    assert rtn["moved"]["mean"] == 0.25
    console = Console(width=240)
    with console.capture() as captured:
        table(cells).show(console)
    text = captured.get()
    assert "72.5 ± 2.5 [70.0, 75.0]" in text
    assert "-2.5 ± 2.5 [-5.0, +0.0]" in text
    assert "7 (1 of 2)" in text
    assert "evaluated" not in text
    assert "runs differ" not in text
    cells[Cell(comparison.variants[0], 1)] = measured(0.7, "another CPU")
    assert remarks(cells) == ["runs differ in device: CPU, another CPU"]
    cells[Cell(comparison.variants[0], 1)] = dataclasses.replace(
        measured(0.7), curves={"learn/clippd": [None]}
    )
    (remark,) = remarks(cells)
    assert (
        remark == "no step measured 'learn/clippd' (figures); docs/reference/metrics.md lists what"
        " there is"
    )


@pytest.mark.slow
def test_cells_are_trained_once_and_go_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Two schemes, two seeds, two at a time. What a kill before the last checkpoint leaves of one
    run, and one before the first of another, is all that is trained again, to the same figures;
    another configuration's run is refused.
    """
    monkeypatch.setattr(sys, "executable", str(forks.interpreter(tmp_path)))
    output = tmp_path / "runs"
    command = [
        "compare",
        "--vary",
        "scheme=bf16,w4a16",
        "--seeds",
        "0,1",
        "--output",
        str(output),
        *SMALL,
    ]
    data = []
    for number in range(2):
        file = tmp_path / f"{number}.json"
        assert main([*command, "--workers", "2", "--json", str(file)]) == 0
        data.append(json.loads(file.read_text())["data"])
        if number == 0:
            for name in ("w4a16-seed1", "bf16-seed0"):
                shutil.rmtree(output / name / "export")
                shutil.rmtree(output / name / "checkpoints/step-000002")
            shutil.rmtree(output / "bf16-seed0/checkpoints")
    out = capsys.readouterr().out
    assert "4 cells, 0 of them finished before, 2 at a time" in out
    assert "4 cells, 2 of them finished before" in out
    assert "run folder" in (output / "bf16-seed0.log").read_text()
    for each in data:
        for cell in each["cells"]:
            del cell["curves"]["seconds"], cell["figures"]["s/step"]
        for row in each["rows"]:
            del row["figures"]["s/step"]
    assert data[0] == data[1]
    assert [(cell["variant"], cell["seed"]) for cell in data[0]["cells"]] == [
        ("bf16", 0),
        ("w4a16", 0),
        ("bf16", 1),
        ("w4a16", 1),
    ]
    assert all(
        len(cell["curves"]["reward"]) == 2 and cell["accuracy"] is not None
        for cell in data[0]["cells"]
    )
    assert data[0]["failed"] == []
    assert data[0]["rows"][1]["reference"] == "bf16"
    assert main([*command, "--lr", "1e-5"]) == 2
    assert "has learner" in capsys.readouterr().err


def test_a_cell_that_fails_is_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Contract: the process exits with the status of the failed seed."""
    child = tmp_path / "child"
    child.write_text('#!/bin/sh\necho "$@"\nexit "$(sed -n "s/^seed: //p" "$5")"\n')
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    comparison = shipped("schemes", tmp_path / "runs", variants=("qarl",), seeds=(0, 3))
    failed = run_cells(comparison, left(comparison), 2, Console())
    assert [each.cell.name for each in failed] == ["qarl-tbpo-seed3", "qarl-grpo-seed3"]
    assert failed[0].reason == f"-m qarl train --config {tmp_path}/runs/qarl-tbpo-seed3.yaml"
    assert "failed with exit status 3" in capsys.readouterr().out
    assert all(left(comparison).values())
    written = yaml.safe_load((tmp_path / "runs" / "qarl-tbpo-seed3.yaml").read_text())
    assert [*written] == [*RunConfig.model_fields], "in the schema's order, for who reads it"


def test_workers_have_their_share_of_cores_and_gpus(monkeypatch: pytest.MonkeyPatch):
    """Some share one if there are fewer GPUs than workers; one worker has all there is."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    for devices, shares in {
        "0,1,2,3,4": ["0,1", "2,3"],
        "5,7": ["5", "7", "5"],
        "8,9": ["8,9"],
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        workers = [_environment(place, len(shares)) for place in range(len(shares))]
        assert [each["CUDA_VISIBLE_DEVICES"] for each in workers] == shares
        threads = None if len(shares) == 1 else str(9 // len(shares))
        assert {each.get("OMP_NUM_THREADS") for each in workers} == {threads}


def test_a_running_cell_shows_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    child = tmp_path / "child"
    child.write_text("#!/bin/sh\necho step 1/9\necho 'step  2/9  ETA 0:09'\nexec sleep 0.5\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr("qarl.compare.cells._SILENT", 0.3)
    comparison = shipped("schemes", tmp_path / "runs")
    console = Console(record=True, width=60)
    cell, commands = next(iter(left(comparison).items()))
    assert not run_cells(comparison, {cell: commands[:1]}, 1, console)
    lines = console.export_text().splitlines()
    assert lines[2] == f"{cell.name}: step  2/9  ETA 0:09"
    assert lines[3].startswith(f"{cell.name}: done in")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_stopped_leaves_no_child(
    number: signal.Signals, early: bool, tmp_path: Path, monkeypatch
):
    """Begun with SIGINT ignored, as in a shell's background. early: before its second cell is
    submitted.
    """
    child = tmp_path / "child"
    child.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))

    def stop() -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    class Pool(ThreadPoolExecutor):
        def submit(self, *job):  # pyright: ignore[reportIncompatibleMethodOverride]
            future = super().submit(*job)
            stop()
            return future

    comparison = shipped("schemes", tmp_path / "runs")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    thread = threading.Thread(target=(lambda: None) if early else stop)
    if early:
        monkeypatch.setattr("qarl.compare.cells.ThreadPoolExecutor", Pool)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_cells(comparison, left(comparison), 1, Console())
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
