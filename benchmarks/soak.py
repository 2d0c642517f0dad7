"""`python -m benchmarks soak`: memory growth of learner and server in a long run.

The run is a `qarl train` of the embedded default with its own server, and publishes a version in
every step. Resident memory without file-backed pages is read for the learner's process and for the
server's. A line is fitted to its means over blocks of steps; the first tenth is left out, because
caches fill in it. At its end the run compares the server's log-probs with a fresh engine's, bit for
bit on CPUs, so a run that finishes has passed that check too.
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from qarl.bench.process import WorkerError
from qarl.report.tables import PlainTable

_BLOCKS = 20
_WARM_UP = 0.1
_EVERY_SECONDS = 0.1
_CANARY_EVERY = 50


def measure(
    steps: int, prompts: int, samples: int, scheme: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the memory of both sides over a run. Raises `WorkerError` if the run fails."""
    with tempfile.TemporaryDirectory(prefix="qarl-bench-") as temporary:
        folder = Path(temporary) / "run"
        command = [
            sys.executable,
            "-m",
            "qarl",
            "train",
            "--scheme",
            scheme,
            "--steps",
            str(steps),
            "--prompts",
            str(prompts),
            "--samples",
            str(samples),
            "--rollout.servers",
            "1",
            "--eval.problems",
            "0",
            "--sync.canary_every",
            str(_CANARY_EVERY),
            "--checkpoint-every",
            str(steps),
            "--mini-batches",
            "1",
            "--output",
            str(folder),
        ]
        log = Path(temporary) / "log"
        begun = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ}
            )
        try:
            points = _watched(process, folder, steps, say)
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise WorkerError(f"the run ended with status {process.returncode}:\n{last}")
        seconds = time.perf_counter() - begun
    return {
        "steps": steps,
        "scheme": scheme,
        "prompts": prompts,
        "samples": samples,
        "seconds": seconds,
        "deltas": sum(point["delta"] for point in points),
        "publishes": len(points),
        "sides": {
            side: fitted([(p["step"], p[side]) for p in points], steps)
            for side in ("learner", "server")
        },
        "points": points[:: max(1, len(points) // 100)],
    }


def _watched(
    process: subprocess.Popen, folder: Path, steps: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row for every step seen except the last.

    A row has both sides' memory in MiB, averaged over the readings in that step, and whether the
    step's version was sent as a delta. The last step is left out because the server's end and a
    fresh engine follow it.
    """
    looked: dict[int, list[tuple[float, float]]] = {}
    deltas: dict[int, bool] = {}
    while process.poll() is None:
        step = _lines(folder / "metrics.jsonl")
        sides = _memory(process.pid) if 0 < step < steps else None
        if sides is not None:
            if step % 100 == 0 and step not in looked:
                say(f"{step} of {steps} steps …")
            looked.setdefault(step, []).append(sides)
            if any((folder / "versions").glob("version-*")):
                deltas[step] = any((folder / "versions").glob("version-*/delta"))
        time.sleep(_EVERY_SECONDS)
    return [
        {
            "step": step,
            "learner": statistics.fmean(learner for learner, _ in seen),
            "server": statistics.fmean(server for _, server in seen),
            "delta": deltas.get(step, False),
        }
        for step, seen in looked.items()
    ]


def _lines(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _memory(pid: int) -> tuple[float, float] | None:
    """Return the memory in MiB of a process, and of all its children together.

    None if it has no children, or if one of them ends meanwhile.
    """
    try:
        learner = psutil.Process(pid)
        servers = learner.children(recursive=True)
        if not servers:
            return None
        return _anonymous(learner), sum(map(_anonymous, servers))
    except psutil.Error:
        return None


def _anonymous(process: psutil.Process) -> float:
    memory = process.memory_info()
    return (memory.rss - memory.shared) / 2**20


def fitted(
    points: Sequence[tuple[int, float]],
    steps: int,
) -> dict[str, float]:
    """Fit a line to points of (step, MiB) by least squares over the means of blocks.

    Returns the first and last block's mean, and the slope in MiB per hundred steps with its
    standard error.
    """
    blocks: dict[int, list[float]] = {}
    first = _WARM_UP * steps
    for step, value in points:
        if step > first:
            block = int((step - first) * _BLOCKS / (steps - first + 1))
            blocks.setdefault(block, []).append(value)
    # middle of each block, in hundreds of steps
    x = [(first + (block + 0.5) * (steps - first) / _BLOCKS) / 100 for block in blocks]
    y = [statistics.fmean(values) for values in blocks.values()]
    slope, intercept = statistics.linear_regression(x, y)
    errors = [b - intercept - slope * a for a, b in zip(x, y, strict=True)]
    residual = sum(error**2 for error in errors) / (len(x) - 2)
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    return {
        "first": y[0],
        "last": y[-1],
        "slope": slope,
        "error": math.sqrt(residual / spread),
    }


def table(data: dict[str, Any]) -> PlainTable:
    """Return the table of both sides' memory."""
    title = (
        f"{data['steps']} steps in {data['scheme']}, {data['seconds']:.0f} s; of"
        f" {data['publishes']} versions seen {data['deltas']} were deltas; log-probs at the end"
        " equal a fresh engine's"
    )
    figures = (
        "first block, MiB",
        "last block",
        "MiB a hundred steps",
        "standard error",
    )
    shown = PlainTable("side", *figures, figures=figures, title=title)
    for side, fit in data["sides"].items():
        shown.add_row(
            side,
            f"{fit['first']:.1f}",
            f"{fit['last']:.1f}",
            f"{fit['slope']:+.3f}",
            f"{fit['error']:.3f}",
        )
    return shown
