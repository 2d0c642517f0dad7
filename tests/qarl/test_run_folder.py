"""A run's folder: locked by its run, gone where the start failed, what a resumed run may be asked,
and what is kept of its steps; a disk that refuses, in a line.

Blind spots: writers are not tried one by one, what they raise is; one process.
tests/runs/test_train.py has whole runs.
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from rich.console import Console
from safetensors import SafetensorError
from tensorboard.summary.writer.record_writer import RecordWriter

from qarl.api import runs
from qarl.cli.main import main, run_command
from qarl.cli.parser import Parser
from qarl.configs.errors import ConfigError
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import Heldout
from qarl.learner.processes import Processes
from qarl.preflight.disk import check_disk, export_bytes, exports_of
from qarl.preflight.files import check_new_folder
from qarl.report import run_folder
from qarl.report.early_warning import EarlyWarning, EarlyWarningError
from qarl.report.metrics import metrics_writer
from qarl.report.run_folder import RunFolder
from qarl.run.export_note import export_note
from qarl.run.policy import open_architecture
from qarl.run.prompts import open_prompter
from qarl.run.session import Position
from qarl.run.step_checkpoints import StepCheckpoints
from qarl.start import RunStart
from qarl.tasks import RewardError
from qarl.tasks.load import load_task
from tests.support import Policies
from tests.support.engines import disturb, make_model
from tests.support.tensors import stream_digest


def new_run(path: Path, *steps: int, **noted: Any) -> RunFolder:
    """Create a run folder with empty checkpoints of these steps. noted: step in the export's note;
    without it there is no export.
    """
    config = load_config(None, {"output": str(path), "steps": "8"})
    run = RunFolder.create(config)
    for step in steps:
        checkpoint = run.checkpoints / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"step": step, "sha256": {}}))
    if noted:
        run.export.mkdir()
        (run.export / "qarl.json").write_text(
            json.dumps(export_note(path, config, 8, run.export) | noted)
        )
    return run


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path):
    """Contract: a second one is told which process has it; the lock goes with the process, also by
    kill -9.
    """
    run = new_run(tmp_path / "run")
    code = f"""
import time
from pathlib import Path
from qarl.report.run_folder import RunFolder
with RunFolder.open(Path({str(run.path)!r})).locked():
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(ConfigError, match=f"is written by process {holder.pid}; wait for it"),
        run.locked(),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run.locked():
        pass


def test_a_discarded_run_takes_the_folders_made_for_it_along(tmp_path: Path):
    (tmp_path / "kept").mkdir()
    run = new_run(tmp_path / "kept" / "made" / "too" / "run")
    assert not run.has_begun()
    run.discard()
    assert list(tmp_path.rglob("*")) == [tmp_path / "kept"]


@pytest.mark.parametrize("resume", [False, True])
def test_only_a_new_run_that_could_not_start_goes(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = new_run(tmp_path / "run")
    monkeypatch.setattr("qarl.loop.train", Mock(side_effect=ConfigError("no")))
    start = RunStart(run.config(), run, Mock(first=True), resume=resume)
    with pytest.raises(ConfigError, match="no"):
        runs.run(start, Console(quiet=True))
    assert run.path.exists() is resume


def test_metrics_are_added_to_what_is_there_of_steps_before(tmp_path: Path):
    """Also where a folder that is resumed has lost its metrics, and where a new run's has some."""
    for resumed, before, after in (
        (2, "", [9]),
        (None, "1", [1, 9]),
        (2, "123", [1, 2, 9]),
    ):
        folder = new_run(tmp_path / f"{resumed}{before}")
        if before:
            folder.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in before))
        with metrics_writer(folder, resumed, True, lambda figures, step: None) as write:
            write(Mock(flat=lambda: {"step": 9}, step=9))
        assert [
            json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()
        ] == after


def test_trying_a_folder_makes_none_that_another_run_may_be_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Runs start side by side in a folder that is not there yet."""
    made: list[Path] = []
    make = os.mkdir

    def recorded(path: str | Path, *args: Any, **options: Any) -> None:
        made.append(Path(path))
        make(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", recorded)
    check_new_folder(tmp_path / "grid" / "one", "run folder", "--output")
    assert [path.parent for path in made] == [tmp_path]
    assert tmp_path / "grid" not in made
    assert list(tmp_path.iterdir()) == []


def test_a_step_or_a_checkpoint_is_a_beginning(tmp_path: Path):
    assert new_run(tmp_path / "a", 2).has_begun()
    run = new_run(tmp_path / "b")
    run.metrics.write_text("{}\n")
    assert run.has_begun()


FINISHED_COMMANDS = [
    (
        "",
        0,
        (
            "is finished: 8 of 8 steps are done, and {run}/export holds its export; nothing "
            "was left to do"
        ),
    ),
    ("--steps 4", 2, "steps 4, but run '{run}' has done 8 already"),
    ("--output else", 2, "--output else does not apply: omit it"),
    ("--config immediate-eos", 2, "--config immediate-eos does not apply: omit it"),
    ("--scheme w8a8", 2, "started with scheme 'w4a16' and cannot be resumed with 'w8a8'"),
]


@pytest.mark.parametrize(("arguments", "status", "said"), FINISHED_COMMANDS)
def test_what_a_finished_run_answers(
    tmp_path: Path, capsys, arguments: str, status: int, said: str
):
    run = new_run(tmp_path / "run", 4, 8, verified=True)
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", "--resume", str(run.path), *arguments.split()]) == status
    printed = capsys.readouterr()
    assert said.format(run=run.path) in printed.out + printed.err
    assert sorted(tmp_path.rglob("*")) == before


def test_one_of_several_processes_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    run = new_run(tmp_path / "run", 4, 8, verified=True)
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--resume", str(run.path)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "noted",
    [{"digest": "d1ce"}, {"verified": True, "step": 4}],
    ids=["unproven", "earlier"],
)
def test_a_run_whose_export_is_not_proven_goes_on(
    tmp_path: Path, monkeypatch, capsys, noted: dict[str, Any]
):
    """Contract: it exports and proves again, whether the proof was missing or failed, or is of
    fewer steps.
    """
    run = new_run(tmp_path / "run", 4, 8, **noted)
    monkeypatch.setattr(
        "qarl.cli.train.plan_memory", Mock(side_effect=ConfigError("its start is planned"))
    )
    assert main(["train", "--resume", str(run.path)]) == 2
    assert "its start is planned" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["train --resume {run}", "export {run} -o {run}-out", "serve {run}", "eval {run}"],
)
def test_a_run_without_a_checkpoint_has_nothing_to_go_on_from(tmp_path: Path, capsys, line: str):
    """While somebody writes it, it is to be waited for; otherwise it will never have one."""
    run = new_run(tmp_path / "run")
    assert main(line.format(run=run.path).split()) == 2
    assert "ended before its first checkpoint, which would have been of step 8" in (
        capsys.readouterr().err
    )
    with run.locked():
        assert main(line.format(run=run.path).split()) == 2
    assert "holds no checkpoint yet, the first of which is of step 8: wait for it" in (
        capsys.readouterr().err
    )


def test_a_newer_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = new_run(tmp_path / "run")
    (run.path / "config.yaml").write_text("future_field: 1\n")
    assert main(["train", "--resume", str(run.path)]) == 2
    assert "the run was started by another version of qarl" in capsys.readouterr().err


def by_text(file: Path) -> None:
    file.write_text("x")


RUST = SafetensorError(
    f"Error while serializing: I/O error: No space left on device (os error {errno.ENOSPC})"
)


@pytest.mark.parametrize("write", [by_text, Mock(side_effect=RUST)], ids=["text", "rust"])
def test_a_full_disk_is_one_line_and_other_errors_stay_what_they_are(
    write, capsys: pytest.CaptureFixture[str]
):
    parser = Parser(prog="qarl")
    parser.set_defaults(
        run=lambda *_: write(Path("/dev/full")),
        fields=False,
        engine=False,
    )
    assert run_command(parser, []) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert message.startswith("disk: cannot write")
    assert "No space left on device; make room" in message
    parser.set_defaults(
        run=lambda *_: by_text(Path("/proc/none/x")),
        fields=False,
        engine=False,
    )
    with pytest.raises(FileNotFoundError):
        run_command(parser, [])


def test_packages_that_do_not_fit_are_one_line(capsys: pytest.CaptureFixture[str]):
    error = ImportError("Could not import module 'PreTrainedModel'")
    error.__cause__ = RuntimeError("operator nms does not exist")
    parser = Parser(prog="qarl")
    parser.set_defaults(run=Mock(side_effect=error), fields=False, engine=False)
    assert run_command(parser, []) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert message.startswith(
        "installation: operator nms does not exist: packages here do not fit one another."
    )


def test_a_disk_without_room_for_one_checkpoint_is_refused(
    random_policy: Policies, monkeypatch: pytest.MonkeyPatch
):
    """Contract: what a checkpoint takes is masters, one moment of Muon's matrices, else AdamW's
    two; adapters pass.
    """
    folder = random_policy(True)
    sizes = {
        n: p.numel() for n, p in make_model(folder, "bf16", kernel="reference").masters.items()
    }
    matrices = sum(size for name, size in sizes.items() if "_proj" in name)
    for name, needed in (
        ("muon", 12 * sum(sizes.values()) - 4 * matrices),
        ("adamw", 12 * sum(sizes.values())),
    ):
        options = {"model": str(folder), "learner.optimizer.name": name}
        for free in (needed - 1, needed):
            monkeypatch.setattr(
                "shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free)
            )
            refused = pytest.raises(
                ConfigError, match=r"takes \d\.\d\d MiB, and .* free; make room"
            )
            with refused if free < needed else contextlib.nullcontext():
                check_disk(load_config(None, options), folder)
            check_disk(load_config(None, options | {"learner.lora.name": "lora"}), folder)


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "nvfp4"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_counted_as_its_tensors(scheme: str, tied: bool, random_policy: Policies):
    """Contract: the bytes are those of the tensors that are published, to the last one."""
    folder = random_policy(tied)
    config = load_config(None, {"model": str(folder), "scheme": scheme})
    tensors = make_model(folder, scheme, kernel="reference").low_bit_tensors()
    written = sum(item.tensor.nbytes for item in tensors)
    assert export_bytes(config, open_architecture(config)) == written


def test_exports_are_counted_that_a_run_writes():
    trained = load_config(None, {"checkpoint.best": "true"})
    assert exports_of(trained) == ["the engine's start", "the export", "the best export"]
    assert exports_of(load_config(None, {"export": "false"})) == ["the engine's start"]


def test_a_run_folder_that_cannot_be_filled_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(run_folder, "describe_environment", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder.create(RunConfig(model="tiny-qwen3", output=str(tmp_path / "some" / "run")))
    assert not [*tmp_path.iterdir()]


def test_the_best_policy_by_accuracy_is_exported(random_policy: Policies, tmp_path: Path):
    """Contract: the one of the highest accuracy since before the run, ties to the earlier; also
    over a resumption.
    """
    source = random_policy(True)
    model = make_model(source, "w4a16")
    folder = RunFolder(tmp_path)
    config = load_config(config_file("tiny-qwen3"), {"checkpoint.best": "true"})
    policy: Any = SimpleNamespace(
        model=model,
        folder=source,
        processes=Processes(),
        prompter=open_prompter(source, config.rollout, config.task),
        task=load_task(config.task),
    )
    at = Position(first_accuracy=0.3)
    checkpoints = StepCheckpoints(config, folder, policy, at)
    digests = []
    rollouts = Any
    for accuracy in (0.2, 0.5, None, 0.5, 0.6):
        if at.step == 4:  # from here on as if resumed
            lines = [
                {"step": 2, "accuracy": 0.5},
                {"step": 4, "accuracy": 0.5},
                {"step": 5, "accuracy": 1},
            ]
            folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
            checkpoints = StepCheckpoints(config, folder, policy, at)
        at.step += 1
        disturb(model, at.step)
        digests.append(stream_digest(model.low_bit_tensors()))
        measured = None if accuracy is None else Heldout(accuracy)
        checkpoints.after_step(rollouts, measured, stopping=False)  # pyright: ignore[reportArgumentType]
        note = tmp_path / "export-best" / "qarl.json"
        best = {1: None, 2: 2, 3: 2, 4: 2, 5: 5}[at.step]
        written = json.loads(note.read_text()) if note.exists() else {"step": None}
        assert written["step"] == best
        assert written.get("digest") == (best and digests[best - 1])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["export-best"]


@pytest.mark.parametrize("stopped", [False, True])
def test_an_early_warning_leaves_the_checkpoint_of_before_it(stopped: bool, tmp_path: Path):
    """Contract: another error of the run, such as a reward's, writes one of the last step."""
    config = load_config(config_file("tiny-qwen3"), {})
    learner = SimpleNamespace(processes=Processes(), batch_complete=True)
    checkpoints = StepCheckpoints(
        config, RunFolder(tmp_path), cast("Any", SimpleNamespace(learner=learner)), Position(step=3)
    )
    checkpoints._write = written = Mock()
    error = EarlyWarningError([EarlyWarning("reward", 3, "the reward fell")])
    with (
        pytest.raises(EarlyWarningError if stopped else RewardError),
        checkpoints.checkpoint_on_error(),
    ):
        raise error if stopped else RewardError("it failed")
    assert written.called is not stopped


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EBADF])
def test_a_full_disk_under_tensorboard_is_said_once(number: int, tmp_path: Path, monkeypatch):
    """Its thread keeps the error for whoever writes next; any other error is shown as ever."""
    folder = new_run(tmp_path / "run")
    shown = list[Any]()
    monkeypatch.setattr(threading, "excepthook", shown.append)
    monkeypatch.setattr(RecordWriter, "write", Mock(side_effect=OSError(number, "of the disk")))
    metrics: Any = SimpleNamespace(flat=lambda: {"step": 1, "reward": 0.5}, step=1)

    def write_on() -> None:
        with metrics_writer(folder, None, True, lambda figures, step: None) as write:
            for _ in range(200):
                write(metrics)
                time.sleep(0.01)

    with pytest.raises(OSError, match="of the disk"):
        write_on()
    assert len(shown) == (number != errno.ENOSPC)
