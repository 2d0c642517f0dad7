#!/usr/bin/env python3
"""Plant random small faults in rooms' code, one at a time, and count those that tests catch.

    scripts/mutate.py --rooms learner quant --count 100 --seed 1 [--json FILE] [--seconds S]

A mutation changes one comparison, constant, operator, min or max, or drops one statement. It is
drawn from the syntax tree of HEAD: a seed draws the same mutations from the same commit. Each is
planted alone in a scratch clone.

Which tests. Nothing is recorded beforehand: the order of the files of tests follows from what they
import. Those that import the changed file and name the changed function go first, then others that
import it or are named after it or its folder, then those that reach it by more imports, then the
rest of tests/ROOM. Within each of these, the room's own files and small ones go first. Tests marked
slow follow after all others. A test that fails is run once more on the unchanged code, and left out
if it fails there, too.

- --seconds: processor time of tests per mutation, imports included. A survivor is a survivor of
  these seconds, and the score is a lower bound.
- --count: mutations of each room. Rooms take turns.
- --json: save the outcomes, of any seeds; the same command continues from them.

A mutation may change nothing that the code does, so not every survivor is a gap: read them. A test
that takes longer than pytest's time limit (pyproject.toml) counts as a catch and is listed
separately. The limit is wall time, so a machine that starves the tests leaves some of them out.

Exit status: 0 all caught, 1 some not.
"""

import argparse
import ast
import contextlib
import functools
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutation, draw

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("configs", "quant", "rollout", "learner", "sync", "qarl")
FORKS = multiprocessing.get_context("forkserver")
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
LIBRARIES = ("torch", "transformers", "vllm", "datasets", "hypothesis")
"""Libraries imported once, which takes 15 s.

Every file of tests runs in a fork of the process that has imported them.
"""
FILE_SECONDS = 3600
"""Upper bound on the wall time of a file of tests, for code that hangs beyond pytest's reach."""
LATE = "time limit"


@dataclass(frozen=True)
class Outcome:
    """Outcome of one mutation."""

    room: str
    mutation: Mutation
    caught_by: str
    """The first failing test, followed by `LATE` if it took too long; "" for a survivor."""
    tests: int
    """Number of tests that ran."""
    cpu_seconds: float
    """Processor time of these tests."""
    seconds: float
    """Wall time."""


class Watch:
    """Plugin of pytest that counts tests, notes the first failure and stops when time is up.

    seconds: processor time that this process and its children may take.
    """

    def __init__(self, seconds: float) -> None:
        self.tests = 0
        self.failed = ""
        self._seconds = seconds

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the first test that fails, and whether it took too long."""
        self.tests += report.when == "call"
        if report.failed and not self.failed:
            late = f" {LATE}" if "from pytest-timeout" in report.longreprtext else ""
            self.failed = f"{report.nodeid}{late}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Stop after the test that used up the time."""
        result = yield
        if cpu_seconds() > self._seconds:
            item.session.shouldstop = "the seconds are used up"
        return result


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    usages = [resource.getrusage(who) for who in whose]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Runner:
    """Runs files of tests in a clone, on sound and on changed code."""

    def __init__(self, clone: Path, seconds: float) -> None:
        self._clone = clone
        self._seconds = seconds
        self._unsound = set[str]()
        """Tests that fail on the unchanged code."""

    def run(self, mutation: Mutation, room: str) -> Outcome:
        """Plant a mutation, run its tests until one fails or time is up, and remove it again."""
        file = self._clone / mutation.file
        sound = file.read_bytes()
        started = time.monotonic()
        tests = 0
        seconds = 0.0
        caught = ""
        ranked = ranked_tests(mutation, room, self._clone)
        turns = [(path, mark) for mark in ("not slow", "slow") for path in ranked]
        while turns and not caught and seconds < self._seconds:
            path, mark = turns[0]
            file.write_bytes(mutation.planted(sound))
            try:
                ran = self._pytest([path, "-m", mark], self._seconds - seconds)
            finally:
                file.write_bytes(sound)
            tests += ran["tests"]
            seconds += ran["cpu_seconds"]
            if ran["failed"] and not self._is_sound(ran["failed"]):
                self._unsound.add(ran["failed"])
                print(f"left out, fails on the unchanged code: {ran['failed']}", flush=True)
                continue  # the same file, without that test
            caught = ran["failed"]
            turns.pop(0)
        wall = time.monotonic() - started
        return Outcome(
            room=room,
            mutation=mutation,
            caught_by=caught,
            tests=tests,
            cpu_seconds=round(seconds, 1),
            seconds=round(wall, 1),
        )

    def _is_sound(self, failed: str) -> bool:
        """Return whether a test passes, or a file is collected, on the unchanged code."""
        name = failed.removesuffix(f" {LATE}")
        collect = [] if "::" in name else ["--collect-only"]
        return not self._pytest([name, *collect], FILE_SECONDS)["failed"]

    def _pytest(self, arguments: list[str], seconds: float) -> dict[str, Any]:
        """Run pytest in a fork of the process with the libraries, and return what `Watch` saw."""
        answer = self._clone.parent / "answer.json"
        answer.unlink(missing_ok=True)
        left_out = [f"--deselect={name.removesuffix(f' {LATE}')}" for name in self._unsound]
        process = FORKS.Process(
            target=_run_pytest, args=(self._clone, [*arguments, *left_out], seconds, answer)
        )
        process.start()
        try:
            process.join(FILE_SECONDS)
            late = process.is_alive()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # the process, and all that it started
            process.join()
        if answer.exists():
            return json.loads(answer.read_text())
        name = f"{arguments[0]} {LATE}" if late else arguments[0]
        return {"tests": 0, "failed": name, "cpu_seconds": 0.0}  # killed, or ended by the fault


def _run_pytest(clone: Path, arguments: list[str], seconds: float, answer: Path) -> None:
    """Run pytest in a process that has imported the libraries, but no module of ours."""
    os.setsid()
    os.chdir(clone)
    os.environ.update(alone(clone))
    sys.path.insert(0, str(clone))
    sys.dont_write_bytecode = True
    file = os.open(clone.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    watch = Watch(seconds)
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    pytest.main([*options, *arguments], plugins=[watch])
    seen = {"tests": watch.tests, "failed": watch.failed, "cpu_seconds": cpu_seconds()}
    answer.write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)


def ranked_tests(mutation: Mutation, room: str, clone: Path) -> list[str]:
    """Return the files of tests that may see a mutation, the likeliest first."""
    file = Path(mutation.file)
    distances = import_distances(file, clone)
    about = re.compile(rf"(^|_)({file.stem.strip('_')}|{file.parent.name})(_|s?$)")
    names = [name.strip("_") for name in mutation.function.split(".") if name != "__init__"]
    named = re.compile(r"\b(" + "|".join(names) + r")\b" if names else "(?!)")
    ranks: list[tuple[float, bool, int, str]] = []
    for path in (clone / "tests").rglob("test_*.py"):
        test = path.relative_to(clone)
        if test.parent.name == "gpu":
            continue
        source = path.read_text()
        distance = distances.get(str(test), math.inf)
        in_room = test.parent.name == room
        if distance == 1 and named.search(source):
            distance = 0
        elif about.search(test.stem.removeprefix("test_")):
            distance = 1
        if in_room or distance < math.inf:
            ranks.append((distance, not in_room, len(source), str(test)))
    return [name for *_, name in sorted(ranks)]


def import_distances(file: Path, clone: Path) -> dict[str, int]:
    """Return how many imports lie between a file of ours and each file that reaches it."""
    distances = {str(file): 0}
    latest = [file]
    while latest:
        modules = {module_name(name) for name in latest}
        distance = distances[str(latest[0])] + 1
        latest = [
            name
            for name, imported in all_imports(clone).items()
            if str(name) not in distances and imported & modules
        ]
        distances |= dict.fromkeys(map(str, latest), distance)
    return distances


@functools.cache
def all_imports(clone: Path) -> dict[Path, set[str]]:
    """Return the modules that each file of ours imports, or names in a string."""
    imports: dict[Path, set[str]] = {}
    for path in (*(clone / "qarl").rglob("*.py"), *(clone / "tests").rglob("*.py")):
        imported = set[str]()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
                imported.add(node.module or "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = node.value.split(".")
                imported |= {".".join(parts[:count]) for count in range(2, len(parts) + 1)}
        imports[path.relative_to(clone)] = imported
    return imports


def module_name(file: Path) -> str:
    """Return the dotted name under which a file is imported."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def alone(clone: Path) -> dict[str, str]:
    """Return the environment in which the clone's code is imported."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PYTHONPATH": str(clone),
        "PATH": path,
        **THREADS,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def main() -> int:
    """Plant every drawn mutation; print the survivors and the score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS, metavar="ROOM")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="keep the outcomes here, and go on from what it holds"
    )
    parser.add_argument(
        "--seconds", type=float, default=90, help="processor time of tests per mutation (90)"
    )
    options = parser.parse_args()
    # SIGTERM then raises, so that the processes started here are ended too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    same = {"commit": commit.strip(), "seconds": options.seconds}
    saved: dict[str, Any] = {**same, "outcomes": []}
    if options.json and options.json.exists():
        saved = json.loads(options.json.read_text())
    if {name: saved.get(name) for name in same} != same:
        parser.error(
            f"{options.json} holds outcomes of another commit or other seconds; name another file"
        )
    # not at the top: forks run the top of this file, and must import the clone's qarl
    from qarl.cli.environment import quiet_libraries

    quiet_libraries()
    os.environ.update(THREADS)
    FORKS.set_forkserver_preload(list(LIBRARIES))
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        clone = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        runner = Runner(clone, options.seconds)
        outcomes: list[dict[str, Any]] = []
        for room, mutation in in_turn(options.rooms, options.count, options.seed, clone):
            earlier = [
                outcome for outcome in saved["outcomes"] if outcome["mutation"] == asdict(mutation)
            ]
            if earlier:
                outcomes += earlier
                continue
            outcome = asdict(runner.run(mutation, room))
            print(line(outcome), flush=True)
            outcomes.append(outcome)
            saved["outcomes"].append(outcome)
            if options.json:
                options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return report(outcomes)


def in_turn(
    rooms: Sequence[str], count: int, seed: int, clone: Path
) -> Iterator[tuple[str, Mutation]]:
    """Yield each room's mutations, one of every room before the second of any."""
    drawn = {room: draw(room, count, seed, clone) for room in rooms}
    for index in range(count):
        for room, mutations in drawn.items():
            if index < len(mutations):
                yield room, mutations[index]


def line(outcome: dict[str, Any]) -> str:
    """Return one row: position, before → after, and the test that caught it."""
    mutation = outcome["mutation"]
    before = " ".join(mutation["before"].split())
    after = " ".join(mutation["after"].split())
    verdict = (
        f"caught by {outcome['caught_by']}"
        if outcome["caught_by"]
        else f"SURVIVED {outcome['tests']} tests"
    )
    return (
        f"{mutation['file']}:{mutation['line']}  {before}  →  {after}  [{verdict},"
        f" {outcome['cpu_seconds']} s of {outcome['seconds']}]"
    )


def report(outcomes: list[dict[str, Any]]) -> int:
    """Print survivors, time limits and each room's score; return 1 if a mutation survived."""
    survivors = [outcome for outcome in outcomes if not outcome["caught_by"]]
    late = [outcome for outcome in outcomes if outcome["caught_by"].endswith(LATE)]
    for title, some in (
        ("survivors", survivors),
        ("caught by the time limit alone", late),
    ):
        print(
            f"\n{len(some)} {title}",
            *(f"  {line(outcome)}" for outcome in some),
            sep="\n",
        )
    caught = Counter(outcome["room"] for outcome in outcomes if outcome["caught_by"])
    print()
    for room, count in Counter(outcome["room"] for outcome in outcomes).items():
        print(f"{room}: {caught[room]} of {count} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
