"""Runs commands in children forked from a process that has everything imported: `python -m tests.support.fork_server`.

A command spends 15 s of CPU on imports and 2 on a run of toy size. Reads one JSON request a line from standard input,
{"arguments", "cwd", "environment", "out"}, and answers with two lines: "begun", with the child's process id, and
"ended", with that and the exit status as `subprocess` gives it. Standard output and error of the child go to the files
`out`.stdout and `out`.stderr. A child is a whole process, less what a fork cannot show: the cost of imports, another
hash seed, the interpreter's end.
"""

import atexit
import json
import os
import sys
import traceback
from typing import Any

from tests.support.imports import import_everything
from tests.support.learner_faults import plant


def _run(request: dict[str, Any]) -> int:
    """In the child, all of it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.path[1:1] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    for descriptor, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"] + ".stdout", os.O_WRONLY | os.O_CREAT),
        (2, request["out"] + ".stderr", os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(name, flags, 0o600), descriptor)
    sys.argv = ["qarl", *request["arguments"]]
    try:
        from qarl.cli.main import main

        plant()
        status = main(request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def main() -> None:
    import_everything()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: children would have locks that nobody opens"
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(json.loads(line)))
        print("begun", child, flush=True)
        print("ended", child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
