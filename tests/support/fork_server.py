"""Server that runs commands in children forked from a process with everything imported.

`tests.support.forks` starts it.

A command spends 15 s of CPU on imports and 2 s on a run of toy size. The server listens at a Unix
socket for each kind of command. A connection sends one line of JSON, {"arguments", "cwd",
"environment", "stdout", "stderr"}, where the last two are files to append to. The server answers
with two lines: "begun" with the child's process id, and "ended" with that id and the exit status as
`subprocess` gives it. Commands of several connections run at once. A child is a complete process,
except for what a fork cannot show: the cost of imports, another hash seed, the interpreter's exit.

Kinds: "qarl" is the command; its `sys.executable` is torchrun's `PYTHON_EXEC` if that is set.
"worker" is the `main` of a module here, with a path. "compressor" is the process that
`qarl.ptq.compressor` starts; it is served by a fork of the server that has imported llmcompressor,
which no other kind may have in its process.
"""

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import select
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.imports import import_everything, no_threads
from tests.support.learner_faults import plant


def _run(kind: str, request: dict[str, Any]) -> int:
    """Run the whole command, in the child."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.path[1:1] = [
        path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path
    ]
    for descriptor, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
        os.dup2(os.open(name, flags, 0o600), descriptor)
    sys.argv = [kind, *request["arguments"]]
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    try:
        status = _MAINS[kind](request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _qarl(arguments: list[str]) -> int:
    from qarl.cli.main import main
    from qarl.ptq import compressor

    compressor._in_own_process = forks.compress
    plant()
    return main(arguments)


def _worker(arguments: list[str]) -> int:
    importlib.import_module(f"tests.support.{arguments[0]}").main(Path(arguments[1]))
    return 0


def _compressor(_arguments: list[str]) -> int:
    from qarl.ptq import compressor

    compressor._restore_granite_experts = lambda: None  # `_import_llmcompressor` did
    compressor._main()
    return 0


_MAINS = {"qarl": _qarl, "worker": _worker, "compressor": _compressor}


def _import_llmcompressor() -> None:
    from qarl.ptq import compressor

    with no_threads():
        compressor._restore_granite_experts()
        for name in ("quantization", "transform.awq", "transform.smoothquant"):
            importlib.import_module(f"llmcompressor.modifiers.{name}")


def _answer(kind: str, connection: socket.socket) -> None:
    """Run one connection's command in a child of this process that serves only this connection."""
    with connection.makefile("rw") as stream:
        request = json.loads(stream.readline())
        child = os.fork()
        if child == 0:
            connection.detach()
            os._exit(_run(kind, request))
        print("begun", child, file=stream, flush=True)
        print(
            "ended",
            child,
            os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
            file=stream,
            flush=True,
        )


def serve(listeners: dict[str, socket.socket], lifeline: int) -> None:
    """Answer connections, by kind, until nobody holds the other end of the pipe `lifeline`."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # connections that ended
        ready, _, _ = select.select(
            [*listeners.values(), lifeline],
            [],
            [],
        )
        if lifeline in ready:
            return
        for kind, listener in list(listeners.items()):
            if listener not in ready:
                continue
            if kind == "compressor" and len(listeners) > 1:
                if os.fork() == 0:
                    _import_llmcompressor()
                    serve({kind: listener}, lifeline)
                    os._exit(0)
                listeners.pop(kind).close()
                continue
            connection, _ = listener.accept()
            if os.fork() == 0:
                _answer(kind, connection)
                os._exit(0)
            connection.close()


def serve_from_fork(listeners: dict[str, socket.socket], lifeline: int) -> None:
    """Serve until the end in the fork of a pytest process, after undoing what that process set up
    for itself.
    """
    try:
        faulthandler.disable()
        sys.unraisablehook = sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        for descriptor in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
        serve(listeners, lifeline)
    finally:
        os._exit(0)


if __name__ == "__main__":
    import_everything()
    numbers = json.loads(sys.argv[1])
    found = {kind: socket.socket(fileno=number) for kind, number in numbers.items()}
    forks.sockets = Path(found["qarl"].getsockname()).parent
    serve(found, lifeline=0)
