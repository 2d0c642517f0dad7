"""`qarl bench speed`: its figures by hand, tables, picture, refusals, and the command from end to
end.

Blind spots: how fast a machine is; a GPU's memory and its waits, of which only the calls are
counted.
"""

import dataclasses
import io
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from qarl.bench import measure, picture, stopwatch
from qarl.bench.figures import (
    SpeedReport,
    Spread,
    engine_rows,
    kept,
    memory_rows,
    step_rows,
)
from qarl.bench.job import PHASES, Answer, Cell, SpeedOptions
from qarl.bench.measure import SpeedPlan, check, job
from qarl.bench.picture import MARK, speed_picture
from qarl.bench.process import WorkerError, last_answer, run_worker
from qarl.bench.tables import tables
from qarl.cli import bench
from qarl.cli.main import main
from qarl.configs.errors import ConfigError, GraphError
from qarl.planning.shapes import NAMED
from qarl.quant.model.agreement import Agreement
from tests.support import Policies
from tests.support.forks import ROOT, Fork

OPTIONS = SpeedOptions(
    model="tiny-qwen3",
    schemes=("w8a8",),
    dtype="bfloat16",
    batches=(4,),
    contexts=(10,),
    decode_tokens=4,
    prompts=2,
    samples=2,
    prompt_tokens=8,
    tokens=8,
    updates=2,
    optimizer="adamw",
    steps=1,
    rounds=2,
    seed=0,
)


def step(sample: float, forward: float) -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0) | {
        "sample": sample,
        "forward": forward,
        "backward": 1.0,
    }


def answer(
    decode: float,
    steps: dict[str, list[dict[str, float]]],
    peak: int,
) -> Answer:
    return Answer([Cell(10, 4, 2 * decode, decode)], steps, peak)


ROUNDS = {
    "bf16": [
        answer(
            1.0,
            {"bf16": [step(8, 1), step(9, 2)]},
            200,
        ),
        answer(4.0, {"bf16": [step(16, 3)]}, 400),
    ],
    "w8a8": [
        answer(
            0.5,
            {"qarl": [step(4, 2), step(6, 1.5)], "plain": [step(5, 1)]},
            150,
        ),
        answer(
            2.0,
            {"plain": [step(9, 3)], "qarl": [step(8, 3)]},
            500,
        ),
    ],
}


def report(answers: dict[str, list[Answer]]) -> SpeedReport:
    return SpeedReport(
        model="tiny-qwen3",
        parameters=400_000,
        options=dataclasses.replace(OPTIONS, rounds=len(answers["bf16"])),
        skipped={},
        engine=engine_rows(answers),
        steps=step_rows(answers),
        memory=memory_rows(answers),
        rounds=answers,
    )


def test_ratios_are_of_one_round_and_a_step_is_its_quickest_phases():
    """Computed by hand. Round 1: bf16 takes 8 + 2 s, w8a8 samples in 4 s whichever learner there is
    and the rest takes 2 and
    2.5 s: 0.6 and 0.65 of bf16, 4 + 2 over 4 + 2.5 of the gain kept. Round 2: 16 + 4 and 8 + 4 s:
      all is kept.
    """
    rows = {(row.scheme, row.kind): row for row in step_rows(ROUNDS)}
    qarl = rows["w8a8", "qarl"]
    plain = rows["w8a8", "plain"]
    assert list(rows) == [("bf16", "bf16"), ("w8a8", "plain"), ("w8a8", "qarl")]
    assert qarl.of_bf16 == Spread.of([0.65, 0.6])
    assert plain.of_bf16 == Spread.of([0.6, 0.6])
    assert qarl.rest_of_bf16 == Spread.of([1.25, 1.0])
    assert qarl.kept == Spread.of([6 / 6.5, 1.0])
    assert plain.kept == Spread.of([1.0, 1.0])
    assert qarl.over_plain is not None
    assert qarl.over_plain.high == pytest.approx(0.5 / 6)
    assert qarl.over_plain.low == 0
    assert plain.over_plain is None
    assert qarl.sampling_speedup == Spread.of([2.0, 2.0])
    assert rows["bf16", "bf16"].kept is None
    assert kept(4, 2, 2) == 1.0
    assert kept(4, 6, 2) == 0.6


def test_figures_at_share_are_of_a_step_that_samples_for_seventy_percent():
    """Computed by hand, in round 1: sampling 70 % of bf16's step halves, 0.35 + 0.3 over 0.35 +
    0.3 · 2.5/2; of the plain step 30 % grow by a quarter.
    """
    qarl = step_rows(ROUNDS)[-1]
    assert qarl.kept_at_share is not None
    assert qarl.kept_at_share.low == pytest.approx(0.65 / 0.725)
    assert qarl.over_plain_at_share is not None
    assert qarl.over_plain_at_share.high == pytest.approx(0.3 * 0.25)


def test_rates_of_the_engine_are_tokens_a_second_and_multiples_of_bf16():
    """Computed by hand: 4 sequences a step of 1 and 4 s are 4 and 1 tokens a second; w8a8 takes
    half as long in both rounds.
    """
    bf16, low_bit = engine_rows(ROUNDS)
    assert bf16.decode == Spread(2.5, 1.0, 4.0)
    assert low_bit.decode_over_bf16 == Spread(2.0, 2.0, 2.0)
    assert bf16.prefill == Spread(12.5, 5.0, 20.0)


def test_a_learner_has_the_peak_of_processes_that_began_with_it():
    """Computed by hand: QaRL's came first in round 1, 150 of 200 bytes, and the plain one in round
    2, 500 of
    400.
    """
    peaks = {
        (row.scheme, row.kind): (row.peak_bytes.median, row.over_bf16.median)
        for row in memory_rows(ROUNDS)
    }
    assert peaks == {
        ("bf16", "bf16"): (300, 1.0),
        ("w8a8", "plain"): (500, 1.25),
        ("w8a8", "qarl"): (150, 0.75),
    }
    one_round = {scheme: answers[:1] for scheme, answers in ROUNDS.items()}
    assert [row.kind for row in memory_rows(one_round)] == ["bf16", "qarl"]


def test_learners_change_places_from_round_to_round():
    plan = SpeedPlan(Path("model"), NAMED["qwen3-8b"], OPTIONS, ["bf16", "w8a8"], {})
    assert job(plan, "w8a8", 0).kinds == ("qarl", "plain")
    assert job(plan, "w8a8", 1).kinds == ("plain", "qarl")
    assert job(plan, "bf16", 1).kinds == ("bf16",)


def test_a_phase_on_a_gpu_ends_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch):
    """Contract: the device is waited for at both ends of a phase. Blind spot: the device is a list
    of calls here.
    """
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    watch = stopwatch.SynchronizedStopwatch()
    with watch("forward"):
        calls.append("forward")
    assert calls == ["wait", "forward", "wait"]
    assert watch.take().keys() == {"forward"}


@pytest.mark.parametrize("rounds", [1, 2])
def test_tables_fit_eighty_columns_of_a_terminal(rounds: int):
    """A row of a table that does not fit would be a block of one line a column."""
    rows = {scheme: answers[:rounds] for scheme, answers in ROUNDS.items()}
    rows |= {"w4a16-channel": rows["w8a8"]}
    for table in tables(report(rows)):
        text = io.StringIO()
        table.show(Console(file=text, width=80, force_terminal=True, color_system=None))
        lines = text.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert "" not in lines


def test_tables_have_the_figures_of_every_learner():
    decode, prefill, steps, parts, memory = (table.texts() for table in tables(report(ROUNDS)))
    assert decode[1:] == [["bf16", "10", "2"], ["w8a8", "10", "5 (2.00)"]]
    assert prefill[1:] == [["bf16", "10", "12"], ["w8a8", "10", "25 (2.00)"]]
    assert [row[0] for row in steps[1:]] == ["bf16", "w8a8 plain", "w8a8 qarl"]
    assert steps[3][1:4] == ["9.25", "0.62", "64%"]
    assert parts[0][1:] == list(PHASES[1:])
    assert memory[2] == ["w8a8 plain", "0", "1.25"]


def test_a_picture_has_every_learner_and_phase_and_is_the_same_again():
    text = speed_picture(report(ROUNDS))
    assert text.startswith(MARK)
    assert text == speed_picture(report(ROUNDS))
    root = ElementTree.fromstring(text)
    words = [
        "".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"bf16", "w8a8", "w8a8 plain", "w8a8 qarl", *PHASES} <= set(words)
    tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "w8a8: 2.00 (2.00 to 2.00)" in tips
    assert "w8a8 qarl, forward: 2.25 s" in tips
    bottom = max(float(element.get("y", 0)) for element in root.iter())
    assert bottom < float(root.get("height", 0))


@pytest.mark.parametrize(
    ("largest", "tick"), [(0.029, 0.005), (0.9, 0.2), (6, 1), (7, 2), (13, 2.5), (130, 25)]
)
def test_an_axis_has_round_ticks_of_which_at_most_six_reach_its_end(largest: float, tick: float):
    """Contract: ticks are 1, 2, 2.5 or 5 times a power of ten apart, as close as six allow."""
    assert picture._tick(largest) == pytest.approx(tick)


def test_a_picture_of_bf16_alone_has_its_step_and_memory():
    root = ElementTree.fromstring(speed_picture(report({"bf16": ROUNDS["bf16"]})))
    assert not list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert list(root.iter("{http://www.w3.org/2000/svg}title"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder. No process of a scheme may start from it."""

    def refuse(*_: Any) -> None:
        pytest.fail("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "run_worker", refuse)
    (tmp_path / "drawn.svg").write_text("<svg>a person's own</svg>")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 0", "--rounds '0' must be a whole number from 1 up"),
        ("--schemes w4a61", "'w4a61' must be one of bf16, w4a16"),
        ("--schemes w4a61", "did you mean 'w4a16'?"),
        ("--batches 1,1", "'1,1' must be different whole numbers from 1 up"),
        ("--updates 2 --prompts 3", "--updates 2 does not divide --prompts 3"),
        ("--json none/speed.json", "'none' cannot be written to"),
        ("--picture none/speed.svg", "there is no folder 'none'"),
        (
            "--picture speed.png",
            "the picture is drawn as SVG; name a file that ends in .svg",
        ),
        (
            "--picture drawn.svg",
            "drawn.svg exists and is not a picture of qarl bench speed",
        ),
        ("--model none/such/folder", "model folder 'none/such/folder' does not exist"),
        ("--kernel auto", "unknown option --kernel"),
    ],
)
def test_refusals_come_before_any_process(arguments: str, message: str, place: Path, capsys: Any):
    files = sorted(place.iterdir())
    assert main(["bench", "speed", *shlex.split(arguments)]) == 2
    assert message in capsys.readouterr().err
    assert sorted(place.iterdir()) == files


def test_a_scheme_of_another_machine_is_refused_by_name_and_left_out_otherwise(
    place: Path, random_policy: Policies, capsys: Any
):
    folder = str(random_policy(True))
    assert main(["bench", "speed", "--model", folder, "--schemes", "nvfp4"]) == 2
    assert "scheme 'nvfp4' cannot run in the engine on this machine" in capsys.readouterr().err
    plan = check(dataclasses.replace(OPTIONS, model=folder, schemes=()))
    assert plan.schemes[0] == "bf16"
    assert "nvfp4" not in plan.schemes
    assert "NVIDIA" in plan.skipped["nvfp4"]


def test_contexts_are_refused_where_the_model_has_fewer_positions(
    random_policy: Policies,
):
    options = dataclasses.replace(OPTIONS, model=str(random_policy(True)), contexts=(600,))
    with pytest.raises(
        ConfigError,
        match=r"608 tokens is to be sampled: 600 of a prompt .* 512 positions",
    ):
        check(options)


@pytest.mark.parametrize(("gpu", "contexts"), [(False, (64, 256)), (True, (64,))])
def test_default_contexts_fit_the_model(
    gpu: bool,
    contexts: tuple[int, ...],
    random_policy: Policies,
    monkeypatch: pytest.MonkeyPatch,
):
    """They are, on a GPU, 512 and 4,096 where the model has as many positions."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    options = dataclasses.replace(OPTIONS, contexts=())
    assert measure._checked_lengths(random_policy(True), options).contexts == contexts


def test_a_model_without_the_engine_s_operators_is_refused(
    random_policy: Policies, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measure, "agreement", lambda *_: Agreement("floor", "it has no graph"))
    with pytest.raises(
        GraphError, match="another step would be timed than a run's: it has no graph"
    ):
        check(dataclasses.replace(OPTIONS, model=str(random_policy(True))))


def test_a_process_that_fails_is_an_error_with_its_last_words():
    with pytest.raises(
        WorkerError,
        match=r"the process of w8a8 ended with status \d+:(.|\n)*no-such-file",
    ):
        run_worker("json.tool", "no-such-file", lambda data: data, "the process of w8a8")


@pytest.fixture
def forked_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of schemes are forks of the server, which has everything imported."""

    def run(
        module: str,
        argument: str,
        parse: Callable[[Any], Any],
        what: str,
    ) -> Any:
        assert module == "qarl.bench.worker"
        (tmp_path / "job.json").write_text(argument)
        out = tmp_path / f"{what}.out"
        errors = tmp_path / f"{what}.err"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        fork = Fork(
            "worker",
            ["bench_worker", str(tmp_path / "job.json")],
            ROOT,
            environment,
            out,
            errors,
        )
        assert fork.wait() == 0, errors.read_text()
        return parse(last_answer(out.read_text()))

    monkeypatch.setattr(measure, "run_worker", run)


@pytest.mark.slow
def test_the_command_measures_prints_draws_and_writes(
    forked_workers: None,
    random_policy: Policies,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "default_model", lambda: str(random_policy(True)))
    sizes = (
        "--batches 1,2 --contexts 8 --decode-tokens 4 --prompts 1 --samples 2 --updates 1 --tokens"
        " 8 --steps 1"
    )
    assert (
        main(
            [
                "bench",
                "speed",
                "--schemes",
                "w8a8",
                "--rounds",
                "1",
                *sizes.split(),
                "--json",
                "speed.json",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "round 1 of 1: w8a8" in out
    assert "wrote bench-speed.svg and speed.json" in out
    assert (tmp_path / "bench-speed.svg").read_text().startswith(MARK)
    record = json.loads((tmp_path / "speed.json").read_text())
    assert record["command"] == f"qarl bench speed --schemes w8a8 --rounds 1 {sizes}"
    assert [row["kind"] for row in record["data"]["steps"]] == ["bf16", "plain", "qarl"]
    assert [row["kind"] for row in record["data"]["memory"]] == ["bf16", "qarl"]
    assert all(row["decode"]["median"] > 0 for row in record["data"]["engine"])
