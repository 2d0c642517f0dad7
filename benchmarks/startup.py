"""Seconds of a first run's commands: `qarl schemes`, `qarl check`, `qarl train` to its first step.

python -m benchmarks.startup [--model smollm2-135m] [--repeat 3] [--no-bytecode] [--json FILE]

Each command runs in a process of its own. Wall time is of little worth on a machine that others
share; CPU seconds are user and system, of the process and of its children. "fresh" is with an empty
cache of QaRL's answers, which `make env` fills. A step is counted when its metrics are written.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from qarl.cli.options import json_file, write_json
from qarl.quant.runtime.answers import cache_folder
from qarl.report.record import record

_INTERVAL = 0.05
"""Seconds between two looks at a command."""
_WARNED = 1
"""Exit status of `qarl check` if something would spoil a run, such as too little free memory."""
_GRACE = 60
"""Seconds for which a training may end after the signal."""


def cpu_seconds(process: psutil.Process) -> float:
    """Return user and system seconds of a process and its children, those that ended included."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
        total += times.children_user + times.children_system  # type: ignore[attr-defined]
    return total


def has_stepped(run: Path) -> bool:
    """Return whether the metrics of a run's first step are written."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return any('"reward"' in line for line in lines)


def measured(
    arguments: list[str], cache: Path, bytecode: bool, run: Path | None = None
) -> dict[str, float]:
    """Run one command and return its wall and CPU seconds.

    cache: folder of QaRL's cache. bytecode: use compiled modules and write them. run: folder of a
    training, which is measured up to its first step and stopped then. Raises `RuntimeError` if the
    command fails.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["QARL_CACHE"] = str(cache)
    if not bytecode:
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": os.devnull}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "qarl", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        watched = psutil.Process(process.pid)
        seconds = 0.0
        while process.poll() is None and not (run and has_stepped(run)):
            seconds = cpu_seconds(watched)
            time.sleep(_INTERVAL)
        wall = time.perf_counter() - began
        if run is not None and process.poll() is None:
            process.terminate()
            process.wait(_GRACE)
        elif process.returncode not in (0, _WARNED if arguments[0] == "check" else 0):
            output.seek(0)
            raise RuntimeError(f"qarl {' '.join(arguments)} failed: {output.read()[-2000:]}")
    return {"wall": wall, "cpu": seconds}


def without_answers(folder: Path) -> Path:
    """Return a new cache in `folder` that has the user's models and no answers."""
    cache = folder / "cache"
    cache.mkdir()
    for entry in cache_folder().iterdir():
        if entry.name != "answers":
            (cache / entry.name).symlink_to(entry)
    return cache


def once(arguments: list[str], cached: bool, bytecode: bool) -> dict[str, float]:
    """Return the seconds of one call, a training in a folder that is removed afterwards.

    cached: use the user's cache. False: one without answers.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache = cache_folder() if cached else without_answers(Path(folder))
        if arguments[0] != "train":
            return measured(arguments, cache, bytecode)
        run = Path(folder) / "run"
        return measured([*arguments, "--output", str(run)], cache, bytecode, run)


def table(model: str, repeat: int, bytecode: bool) -> list[dict[str, Any]]:
    """Return a row for each command, its seconds being medians of `repeat` calls."""
    commands = {
        "schemes": ["schemes"],
        "check": ["check", "--model", model],
        "train, to its first step": ["train"],
    }
    for arguments in commands.values():
        once(arguments, True, bytecode)  # compiles modules and fills the cache of answers
    rows = []
    for name, arguments, cached in (
        ("schemes, no answers", commands["schemes"], False),
        ("check, no answers", commands["check"], False),
        *((name, arguments, True) for name, arguments in commands.items()),
    ):
        calls = [once(arguments, cached, bytecode) for _ in range(repeat)]
        seconds = {kind: median(call[kind] for call in calls) for kind in ("wall", "cpu")}
        rows.append({"command": name, **seconds, "calls": repeat})
        figures = f"wall {seconds['wall']:6.1f} s  CPU {seconds['cpu']:6.1f} s"
        print(f"{name:45s} {figures}", flush=True)
    return rows


def main() -> None:
    """Print the table, and write it as JSON if `--json` is set."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--no-bytecode", action="store_true")
    parser.add_argument("--json", type=json_file, metavar="FILE")
    arguments = parser.parse_args()
    rows = table(arguments.model, arguments.repeat, not arguments.no_bytecode)
    if arguments.json:
        write_json(arguments.json, record(sys.argv[1:], rows, "python -m benchmarks.startup"))


if __name__ == "__main__":
    main()
