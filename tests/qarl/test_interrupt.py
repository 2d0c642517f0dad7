"""Signals that stop a run, in a small process of their own.

tests/runs/ stops whole runs by them. Blind spot: schedulers themselves.
"""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qarl.quant.runtime.parent import STOP_SIGNALS
from tests.support.forks import ROOT

STEPS = """
import sys, time
from qarl.run.interrupt import Interrupted, deferred_interrupt, interruptible
try:
    with interruptible(), deferred_interrupt() as received:
        print("ready", flush=True)
        end = time.monotonic() + 20
        while not received and time.monotonic() < end:
            time.sleep(0.01)
        print("received", *received, flush=True)
        time.sleep(float(sys.argv[1]))
        print("saved", flush=True)
except Interrupted as interrupted:
    print("interrupted", interrupted.number, flush=True)
"""


def started(code: str, *arguments: str, **options: object) -> "subprocess.Popen[str]":
    """Start Python on `code`, with SIGHUP as in a terminal, also if the tests run under nohup."""
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(  # pyright: ignore
        command,
        cwd=ROOT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        **pipes,  # pyright: ignore
    )


def output_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_lets_the_step_finish(number: signal.Signals):
    process = started(STEPS, "0")
    assert output_line(process) == "ready"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out.split("\n") == [f"received {int(number)}", "saved", ""]
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"{name}: finishing the step in hand" in err


def test_a_signal_that_arrives_twice_at_once_is_one():
    """A scheduler sends it to a whole job, and a launcher passes it on."""
    process = started(STEPS, "0.5")
    assert output_line(process) == "ready"
    process.send_signal(signal.SIGTERM)
    assert output_line(process) == "received 15"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "saved\n"


def test_a_second_signal_stops_at_once():
    process = started(STEPS, "60")
    assert output_line(process) == "ready"
    process.send_signal(signal.SIGUSR1)
    assert output_line(process) == "received 10"
    time.sleep(1.2)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "interrupted 15\n"
    assert time.monotonic() - begun < 30


def test_a_hang_up_that_nohup_ignores_stops_nothing():
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        " os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    )
    process = started(ignoring, STEPS, "0")
    assert output_line(process) == "ready"
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "received 15\nsaved\n"


def test_a_run_whose_terminal_is_gone_saves(tmp_path: Path):
    """Close a terminal under a process that goes on printing to it."""
    code = STEPS.replace(
        'print("saved"', f'open({str(tmp_path / "saved")!r}, "w").close(); print("s"'
    )
    ours, theirs = pty.openpty()
    process = started(code, "0.2", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as terminal:
        # The whole line: the process may write its end apart, and must not lose the terminal there.
        assert terminal.readline() == b"ready\r\n"
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "begin",
    [
        "from qarl.quant.runtime.parent import *; leave_stop_signals_to_the_parent()\n"
        "for number in STOP_SIGNALS: os.kill(os.getpid(), number)",
        "from qarl.run.interrupt import *; context = interruptible(); context.__enter__()",
        "from qarl.run.interrupt import *; context = deferred_interrupt(); context.__enter__()",
    ],
    ids=["child", "startup", "steps"],
)
def test_what_a_process_forks_or_starts_ends_by_sigterm(begin: str):
    """A pool ends its processes by it. A child leaves its own signals to its parent."""
    code = f"""
import multiprocessing, os, signal, subprocess, time
{begin}
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
forked.start()
forked.terminate()
forked.join()
program = subprocess.Popen(["sleep", "60"])
program.terminate()
print(forked.exitcode, program.wait())
"""
    assert started(code).communicate(timeout=60) == ("-15 -15\n", "")
