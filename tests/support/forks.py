"""Client of `tests.support.fork_server`, which it starts if none runs."""

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
KINDS = ("qarl", "worker", "compressor")

sockets: Path | None = None
"""Folder of the server's sockets, named by kind. A forked command has it from its server."""


def _listeners() -> dict[str, socket.socket]:
    global sockets
    sockets = Path(tempfile.mkdtemp(prefix="qarl-forks-"))
    atexit.register(_remove, sockets, os.getpid())
    listeners = {kind: socket.socket(socket.AF_UNIX) for kind in KINDS}
    for kind, listener in listeners.items():
        listener.bind(str(sockets / kind))
        listener.listen()
    return listeners


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # forks inherit what this process does at its end
        shutil.rmtree(folder, ignore_errors=True)


def start() -> None:
    """Start the server in its own process, which imports what it needs."""
    listeners = _listeners()
    numbers = {kind: listener.fileno() for kind, listener in listeners.items()}
    command = [sys.executable, "-m", "tests.support.fork_server", json.dumps(numbers)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    kept = list(numbers.values())
    server = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        pass_fds=kept,
    )
    atexit.register(server.kill)
    for listener in listeners.values():
        listener.close()


def start_from_here() -> None:
    """Start the server as a fork of this process, which imports everything first so that the server
    need not.
    """
    from tests.support import fork_server
    from tests.support.imports import import_everything

    import_everything()
    listeners = _listeners()
    lifeline, held = os.pipe()
    if os.fork() == 0:
        os.close(held)
        fork_server.serve_from_fork(listeners, lifeline)
    os.close(lifeline)
    for listener in listeners.values():
        listener.close()


class Fork:
    """Running command of one kind. `tests.support.fork_server` describes its fields."""

    def __init__(
        self,
        kind: str,
        arguments: list[str],
        cwd: Path,
        environment: dict[str, str],
        out: Path,
        err: Path,
    ):
        if sockets is None:
            start()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(sockets / kind))  # type: ignore[operator]
        self._stream = self._socket.makefile("rw")
        request = {"arguments": arguments, "cwd": str(cwd), "environment": environment}
        print(
            json.dumps({**request, "stdout": str(out), "stderr": str(err)}),
            file=self._stream,
            flush=True,
        )
        self.pid = self._answer("begun")[0]

    def _answer(self, word: str) -> list[int]:
        found, *numbers = self._stream.readline().split() or [""]
        assert found == word, "the fork server ended"
        return list(map(int, numbers))

    def wait(self) -> int:
        """Wait for the exit status and return it as `subprocess` gives it."""
        status = self._answer("ended")[1]
        self._stream.close()
        self._socket.close()
        return status


def compress(work: Path, log: Path) -> int:
    """Replace `qarl.ptq.compressor._in_own_process`, which saves 12 s of CPU."""
    return Fork(
        "compressor",
        ["job.json"],
        work,
        {**os.environ, "PYTHONPATH": str(ROOT)},
        log,
        log,
    ).wait()


def interpreter(folder: Path) -> Path:
    """Write an executable for `sys.executable -m qarl` whose command runs in the fork server and
    receives forwarded signals.
    """
    if sockets is None:
        start()
    file = folder / "python"
    file.write_text(
        f"#!{sys.executable}\n"
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"os.environ['PYTHONPATH'] = {str(ROOT)!r}\nos.environ.pop('PYTHON_EXEC', None)\n"
        "from tests.support import forks\n"
        f"forks.sockets = Path({str(sockets)!r})\n"
        "log = Path(os.readlink('/proc/self/fd/1'))\n"
        "arguments = sys.argv[sys.argv.index('qarl') + 1 :]\n"
        "fork = forks.Fork('qarl', arguments, Path.cwd(), dict(os.environ), log, log)\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda number, _: os.kill(fork.pid, number))\n"
        "sys.exit(fork.wait())\n"
    )
    file.chmod(0o755)
    return file
