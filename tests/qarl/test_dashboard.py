"""A run as a person sees it: the live panel before and after a step, at any width; lines without
a terminal; figures in Weights & Biases, offline, where it is installed. Tables: whole names, whole
figures, alike rows folded.
"""

import io
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from qarl.api.runs import run
from qarl.configs.errors import ConfigError
from qarl.configs.load import config_file, load_config
from qarl.evaluation.heldout import Heldout, heldout
from qarl.learner.learn_stats import LearnStats
from qarl.learner.mismatch import Mismatch
from qarl.quant.types import LayerReport
from qarl.report import loggers
from qarl.report.dashboard import Dashboard, sparkline
from qarl.report.early_warning import EarlyWarning
from qarl.report.loggers import step_logger
from qarl.report.metrics import StepMetrics
from qarl.report.run_folder import RunFolder
from qarl.report.start_note import audit_table
from qarl.report.startup import phase, phases_shown_on, say
from qarl.report.tables import PlainTable
from qarl.start import RunStart
from qarl.sync.audit import AuditRow
from tests.support.expected import assert_expected

A_STEP: dict[str, Any] = {
    "prompts": 4,
    "unscored": 0,
    "reward_deviation": 0.4,
    "response_tokens": 5.25,
    "truncated": 0.125,
    "mixed_reward_groups": 1.0,
    "error_tokens": 0.0,
    "improbable_tokens": 0.0,
    "repeated_tokens": 0.0,
    "error_tokens_negative": None,
    "error_tokens_positive": None,
    "conversation": None,
    "rewards": None,
    "skipped_batches": 0,
    "digest": None,
    "canary": None,
    "staleness": None,
}
"""Metrics of a step, except those that change from step to step."""


def stats(lr: float) -> LearnStats:
    mismatch = Mismatch(**{field.name: 1e-3 for field in fields(Mismatch)})
    apart = {"mismatch", "seconds", "lr", "records"}
    numbers = {field.name: 0.25 for field in fields(LearnStats) if field.name not in apart}
    return LearnStats(**numbers, mismatch=mismatch, seconds={}, lr=lr, records={})  # pyright: ignore[reportArgumentType]


def step(number: int, reward: float, learned: bool = True) -> StepMetrics:
    seconds = {"sample": 1.0, "learn": 2.0}
    learned_from = stats(5e-4) if learned else None
    changing = {
        "step": number,
        "weight_version": number,
        "reward": reward,
        "heldout": Heldout(0.5) if number == 2 else None,
    }
    return StepMetrics(**A_STEP, **changing, learn=learned_from, seconds=seconds)


def shown(
    show: Callable[[Console], object],
    columns: int,
    terminal: bool = True,
) -> list[str]:
    console = Console(width=columns, color_system=None, force_terminal=terminal)
    with console.capture() as captured:
        show(console)
    return captured.get().splitlines()


def drawn(dashboard: Dashboard, columns: int) -> list[str]:
    return shown(lambda console: console.print(dashboard.panel()), columns)


@pytest.mark.parametrize(
    ("steps", "terminal", "every"), [(5, True, 2), (150, True, 20), (45, False, 100)]
)
def test_the_panel_and_its_lines_are_as_expected(
    steps: int, terminal: bool, every: int, monkeypatch
):
    """The phase and its seconds, of a terminal after some of its steps, and elsewhere of all; at
    most 80 columns.
    """
    clock = Mock(return_value=100.0)
    shown = []
    warnings = [EarlyWarning("reward", 3, "the reward fell [sic]")]
    console = Console(file=io.StringIO(), width=120, color_system=None, force_terminal=terminal)
    config = load_config(
        config_file("tiny-qwen3"),
        {"steps": str(steps), "eval.every": str(every), "model": "a/[model]"},
    )
    monkeypatch.setattr("qarl.report.dashboard.time.monotonic", clock)
    with patch("qarl.report.dashboard.Live"):
        dashboard = Dashboard(config, console)
    dashboard.baseline(Heldout(0.123))
    dashboard.audited(large_model(), {"w4a16": "a kernel", "bf16": "cast"}, terminal, ["a [line]"])
    for number in range(1, steps + 1):
        clock.return_value += 5.0 * number
        dashboard.entered("sample" if number % 2 else "learn")
        of_step = step(number, number * number % 7 - 2.0, learned=number % 4 != 0)
        dashboard.stepped(
            replace(of_step, seconds={**of_step.seconds, "evaluate": 40.0 * (number % 3)}),
            warnings[number != 3 :],
        )
        clock.return_value += 60
        shown += drawn(dashboard, 120) if terminal and number in (2, 12, 149) else []
    dashboard.finished()
    assert isinstance(console.file, io.StringIO)
    assert max(map(len, [*shown, ""])) <= 80
    printed = console.file.getvalue().splitlines()
    if shown:
        assert_expected(__file__, f"dashboard-during-{steps}-steps", shown)
    assert_expected(__file__, f"dashboard-{steps}-steps", drawn(dashboard, 120) + printed)


def test_a_run_that_rewards_alone_judge_shows_their_mean():
    """Before training, in the lines of steps, and as a gain at the end."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    dashboard = Dashboard(load_config(None, {"steps": "2"}), console)
    first = Heldout(0.0, -1.5)
    dashboard.baseline(first)
    dashboard.stepped(replace(step(2, 0.5), heldout=Heldout(0.0, -1.25)))
    assert isinstance(console.file, io.StringIO)
    begun, line = console.file.getvalue().splitlines()
    assert begun == "before training: held-out mean reward -1.5"
    assert line.endswith("held-out reward -1.25")
    assert heldout({"heldout_accuracy": 0.0, "heldout_reward": -1.25}) == Heldout(0.0, -1.25)
    assert Heldout(0.0, -1.25).since(first) == "+0.25"
    assert Heldout(0.5).since(Heldout(0.25)) == "+25.0 points"


def test_sparklines_are_scaled_from_the_smallest_to_the_largest():
    assert sparkline([]) == ""
    assert sparkline([-3.0, -1.0]) == "▁█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline(list(range(1000)))) == 48


def test_a_phase_of_the_start_is_shown_at_once_and_its_seconds_at_its_end():
    """It has a line of its own, also where it fails."""
    file = io.StringIO()
    with phases_shown_on(Console(file=file, width=80)):
        with phase("loading"):
            assert file.getvalue() == "loading … "
        with pytest.raises(ValueError, match="lost"), phase("failing"):
            raise ValueError("lost")
    with phases_shown_on(Console(file=(plain := io.StringIO()), width=12, force_terminal=True)):
        say("[bold]1[/bold] of 'some' long words")
    assert plain.getvalue() == "[bold]1[/bold] of 'some' long words\n", "no markup, color or break"
    loading, failing = file.getvalue().splitlines()
    assert loading.startswith("loading … 0.")
    assert loading.endswith(" s")
    assert failing == "failing … "


def test_figures_are_logged_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip(
        "wandb", reason="an optional extra, in none of the locks: pip install qarl-train[log]"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = load_config(None, {"log": "wandb"})
    for steps in ((1, 2), (2, 3)):
        with step_logger(config, tmp_path) as log:
            for step in steps:
                log({"reward": step / 4, "learn/mismatch/k3": 0.0}, step)
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{tmp_path.name}.wandb"))) == 2


def test_a_logger_that_fails_stops_a_start_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Contract: without a login the run ends in a line, before anything is loaded; later the loss
    is said once.
    """
    config = load_config(None, {"log": "wandb", "steps": "1"})
    logged = SimpleNamespace(log=Mock(side_effect=OSError("no network")), finish=Mock())
    library = SimpleNamespace(init=lambda **_: logged)
    monkeypatch.setattr(loggers, "import_module", lambda name: library)
    console = Console(file=io.StringIO(), width=200)
    with phases_shown_on(console), step_logger(config, tmp_path) as log:
        log({"reward": 0.5}, 1)
        log({"reward": 0.5}, 2)
    assert isinstance(console.file, io.StringIO)
    assert (
        console.file.getvalue().count(
            "step 1: log 'wandb' failed: no network; the run goes on without it"
        )
        == 1
    )
    assert logged.log.mock_calls == [call({"reward": 0.5}, step=1)]
    assert not logged.finish.called
    library.init = Mock(side_effect=RuntimeError("no API key"))
    with pytest.raises(
        ConfigError, match=r"log 'wandb' cannot begin: no API key; .*WANDB_MODE=offline"
    ):
        run(RunStart(config, RunFolder(tmp_path)), console)


def audited(
    name: str, scheme: str = "w4a16", engine_kernel: str = "CPUWNA16LinearKernel"
) -> AuditRow:
    group = 128 if scheme == "w4a16" else None
    kernels = ("CPUWNA16LinearKernel", engine_kernel)
    learner, engine = (
        LayerReport(name, scheme, group, "torch.bfloat16", kernel) for kernel in kernels
    )
    return AuditRow(name, learner, engine, "")


def large_model() -> list[AuditRow]:
    parts = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
    ]
    rows = [
        audited(
            f"model.layers.{i}.{part}",
            "bf16" if part == "mlp.down_proj" and i in (0, 1, 27) else "w4a16",
        )
        for i in range(28)
        for part in parts
    ]
    experts = [
        audited(f"model.layers.{i}.mlp.experts.{e}.up_proj") for i in range(28) for e in range(3)
    ]
    return [*rows, *experts, audited("lm_head", "bf16")]


def test_kernels_that_differ_have_a_column_each():
    lines = shown(audit_table([audited("lm_head", engine_kernel="MarlinLinearKernel")]).show, 200)
    assert lines[-1].split()[-2:] == ["CPUWNA16LinearKernel", "MarlinLinearKernel"]


def test_a_table_too_narrow_for_its_words_is_a_block_a_row():
    table = PlainTable("a name", "b")
    table.add_row("longer than", "twelve-letters")
    assert shown(table.show, 12) == [
        "a name  longer",
        "        than",
        "b       twelve-letters",
        "",
    ]


_CELLS = st.text("abcde [/]…×", max_size=40).map(str.strip)


@given(
    st.lists(st.tuples(_CELLS, _CELLS, st.floats(0, 1e9)), min_size=1, max_size=5),
    st.integers(5, 120),
)
def test_no_word_is_cut_and_no_line_longer_than_it_must(
    rows: list[tuple[str, str, float]], columns: int
):
    table = PlainTable(
        "a name", "some words", "a figure", figures=["a figure"], title="what it shows"
    )
    for name, words, figure in rows:
        table.add_row(name, Text(words, style="red"), f"{figure:.3e}")
    lines = shown(table.show, columns)
    words = {word for row in rows for cell in row[:2] for word in cell.split()} | {
        f"{row[2]:.3e}" for row in rows
    }
    assert words <= set(" ".join(lines).split())
    longest = max(map(len, words))
    assert max(map(len, lines)) <= max(columns, longest + len("some words") + 2)
    assert len(shown(table.show, columns, False)) == 2 + len(rows), (
        "without a terminal: a line a row"
    )
