"""Whole commands as a person types them."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--steps", "4", "--prompts", "8", "--samples", "4", "--eval.problems", "32", "--eval-every", "2",
         "--checkpoint-every", "2", "--mini-batches", "2"]  # fmt: skip


def command(*arguments: str | Path) -> list[str]:
    """What starts `qarl ARGUMENTS`."""
    return [sys.executable, "-m", "qarl.cli", *once(list(map(str, arguments)))]


def once(arguments: list[str]) -> list[str]:
    """Of an option given twice the last, so that a test may change one of `SMALL`; `qarl` itself refuses it."""
    kept: list[str] = []
    for index, item in enumerate(arguments):
        value_of = arguments[index - 1] if index and arguments[index - 1].startswith("--") else None
        option = item if item.startswith("--") else value_of
        if option is None or option not in arguments[index + 1 :]:
            kept.append(item)
    return kept


def environment(*folders: Path) -> dict[str, str]:
    """Of a command: this process's own, wide lines, and folders where modules are found besides the checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))), "COLUMNS": "200"}


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


class Run:
    """`qarl ARGUMENTS`, begun in a child of the fork server; one at a time. folders: see `environment`."""

    def __init__(self, *arguments: str | Path, cwd: Path | None = None, folders: Sequence[Path] = ()):
        self.args = once(list(map(str, arguments)))
        self._folder = tempfile.TemporaryDirectory(prefix="qarl-run-")
        self._server = _fork_server()
        request = {
            "arguments": self.args,
            "cwd": str(cwd or ROOT),
            "environment": environment(*folders),
            "out": f"{self._folder.name}/out",
        }
        assert self._server.stdin is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        self.pid = self._answer("begun")[0]

    def _answer(self, kind: str) -> list[int]:
        """The server's next answer of this kind; a run whose test failed may have left one of the other."""
        assert self._server.stdout is not None
        for line in self._server.stdout:
            word, *numbers = line.split()
            if word == kind:
                return list(map(int, numbers))
        raise AssertionError(f"the fork server ended with status {self._server.wait()}")

    def poll(self) -> int | None:
        """None while it runs."""
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def wait(self) -> subprocess.CompletedProcess[str]:
        """To the run's end."""
        _, status = self._answer("ended")
        out, err = (Path(f"{self._folder.name}/out.{name}").read_text() for name in ("stdout", "stderr"))
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.args, status, out, err)


def qarl(
    *arguments: str | Path, cwd: Path | None = None, folders: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `qarl ARGUMENTS` to its end; folders: see `environment`."""
    return Run(*arguments, cwd=cwd, folders=folders).wait()


def qarl_alone(
    *arguments: str | Path, cwd: Path | None = None, folders: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """As `qarl`, by the real command: 15 s of CPU more. For what a fork cannot show."""
    env = environment(*folders)
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, env=env, timeout=600)


def lines(run: Path) -> list[dict[str, Any]]:
    """Metrics without wall times: all that two equal runs must share."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "learn/seconds/"))} for line in found]


def wait_for_lines(process: subprocess.Popen[Any] | Run, file: Path, count: int) -> None:
    for _ in range(9000):
        if file.exists() and len(file.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.02)
    raise AssertionError(f"{file} never had {count} lines")
