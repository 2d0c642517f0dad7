"""Whole commands as a person types them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.rollout.servers.vllm.start import free_ports
from tests.support.forks import ROOT, Fork

SMALL = [
    "--steps",
    "4",
    "--prompts",
    "8",
    "--samples",
    "4",
    "--eval.problems",
    "32",
    "--eval-every",
    "2",
    "--checkpoint-every",
    "2",
    "--mini-batches",
    "2",
]


def command(*arguments: str | Path) -> list[str]:
    """Return the command line that starts `qarl ARGUMENTS`."""
    return [sys.executable, "-m", "qarl", *once(list(map(str, arguments)))]


def once(arguments: list[str]) -> list[str]:
    """Keep the last value of an option that is given twice, so that a test may change one of
    `SMALL`. `qarl` itself refuses such an option.
    """
    kept: list[str] = []
    for index, item in enumerate(arguments):
        value_of = arguments[index - 1] if index and arguments[index - 1].startswith("--") else None
        option = item if item.startswith("--") else value_of
        if option is None or option not in arguments[index + 1 :]:
            kept.append(item)
    return kept


def environment(*folders: Path) -> dict[str, str]:
    """Return the environment of a command: this process's own, wide lines, and folders with modules
    in addition to the checkout.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))),
        "COLUMNS": "200",
    }


class Run:
    """`qarl ARGUMENTS`, started in a child of the fork server.

    `environment` describes `folders`.
    """

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        folders: Sequence[Path] = (),
    ):
        self.args = once(list(map(str, arguments)))
        self._folder = tempfile.TemporaryDirectory(prefix="qarl-run-")
        self._out = Path(self._folder.name) / "stdout"
        self._err = Path(self._folder.name) / "stderr"
        self._fork = Fork(
            "qarl", self.args, cwd or ROOT, environment(*folders), self._out, self._err
        )
        self.pid = self._fork.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the command runs."""
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for the run's end."""
        status = self._fork.wait()
        out = self._out.read_text()
        err = self._err.read_text()
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.args, status, out, err)


def qarl(*arguments: str | Path, **where: Any) -> subprocess.CompletedProcess[str]:
    """Run `qarl ARGUMENTS` to its end. `Run` describes the other arguments."""
    return Run(*arguments, **where).wait()


def succeeded(*arguments: str | Path, **where: Any) -> subprocess.CompletedProcess[str]:
    """Run like `qarl` and assert success."""
    done = qarl(*arguments, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def qarl_alone(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run like `qarl` but as the real command, at 15 s more of CPU. For what a fork cannot show."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )


def run_workers(module: str, argument: Path, log: Path, count: int = 2) -> None:
    """Run `main` of that module of tests.support in a group of so many processes, with torchrun's
    environment.
    """
    place = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
    }
    ranks = [
        Fork(
            "worker",
            [module, str(argument)],
            ROOT,
            environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            log,
            log,
        )
        for rank in range(count)
    ]
    assert [each.wait() for each in ranks] == [0] * count, log.read_text()


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the metrics without wall times, which two equal runs must share."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("seconds/", "learn/seconds/"))}
        for line in found
    ]


def wait_for_lines(process: Run, file: Path, count: int) -> None:
    for _ in range(9000):
        if file.exists() and len(file.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.02)
    raise AssertionError(f"{file} never had {count} lines")
