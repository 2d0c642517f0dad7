#!/usr/bin/env python3
"""Plant random small faults in a room's code, one at a time, and count those that its tests catch.

    scripts/mutate.py --room learner --count 100 --seed 1 [--json FILE] [--seconds S]
        [--tests PATH …] [--survivors JSON]

A mutation changes one comparison, constant, operator, min or max, or drops one statement. It is
drawn from the syntax tree of HEAD: a seed draws the same mutations from the same commit. Each is
planted alone in a scratch clone.

Order of the tests. Tests that run the changed function go first, the fastest in front, followed by
those that run other functions of its file. If no test is seen to run it (it is compiled, or read at
import), tests that run files that import it follow, and then all. Files whose tests share a
fixture, such as an engine, keep their order. The tests that run each function are recorded once per
commit. Tests that fail on the unchanged code are left out.

- --seconds: run only the first tests that together take that long. A survivor is then a survivor of
  those, and the score is a lower bound.
- --tests: run other tests than the room's, such as `--tests tests/learner tests/engine`.
- --survivors: plant only the survivors of an earlier --json, of the same commit and room. This
  tries the mutations that a room's tests missed on the rest of the suite.
- --json: save the outcomes, of any seeds; the same command continues from them.

A mutation may change nothing that the code does, so not every survivor is a gap: read them. Tests
over the time limit count as a catch and are listed separately.

Exit status: 0 all caught, 1 some not.
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from calls import Calls
from mutations import Mutation, draw

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
ROOMS = ("configs", "quant", "rollout", "learner", "sync", "qarl")
FORKS = multiprocessing.get_context("forkserver")
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
LIBRARIES = ("torch", "transformers", "vllm", "datasets", "hypothesis")
"""Libraries imported once, which takes 15 s.

Every mutation's tests run in a fork of the process that has imported them.
"""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one mutation."""

    mutation: Mutation
    caught_by: str
    """The first failing test, "time limit", or "" for a survivor."""
    tests: int
    """Number of tests that ran the function."""
    seconds: float


class Recorder:
    """Plugin of pytest that records passing tests.

    For each it records its seconds and the functions of ours that it ran, in child processes too.
    Functions that a fixture of a module or session ran belong to every test that uses the fixture.
    """

    def __init__(self, calls: Calls) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._calls = calls
        self._now = set[str]()
        self._fixtures = dict[str, set[str]]()
        self._passed = False
        self._sharing = set[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Record the functions that a fixture of several tests ran."""
        before = self._now | self._calls.taken()
        self._now = set()
        result = yield
        self._now |= self._calls.taken()
        if fixturedef.scope in ("class", "module"):
            self._sharing.add(fixturedef.baseid)
        if fixturedef.scope != "function":
            self._fixtures.setdefault(fixturedef.argname, set()).update(self._now)
        self._now |= before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Watch one test, including its fixtures."""
        self._now = set()
        self._passed = True
        started = time.monotonic()
        self._calls.taken()
        result = yield
        self._now |= self._calls.taken()
        shared = [self._fixtures.get(name, set()) for name in item.fixturenames]
        if self._passed:
            ran = sorted(self._now.union(*shared))
            self.tests[item.nodeid] = {
                "seconds": time.monotonic() - started,
                "functions": ran,
            }
        return result

    def pytest_sessionfinish(self) -> None:
        """Mark the tests whose file keeps its order; only now are these files known."""
        for name, test in self.tests.items():
            test["together"] = name.partition("::")[0] in self._sharing

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note whether the test passed, because skipped and failing tests catch nothing."""
        self._passed &= report.passed


def record(
    paths: list[str],
    clone: Path,
) -> dict[str, dict[str, Any]]:
    """Run these tests on the unchanged code, one file at a time, and return what each ran."""
    tests: dict[str, dict[str, Any]] = {}
    for path in paths:
        file = clone / path.partition("::")[0]
        for one in sorted(file.rglob("test_*.py")) if file.is_dir() else [path]:
            ran = clone / "ran.json"
            ran.unlink(missing_ok=True)
            process = FORKS.Process(target=_pytest, args=(clone, [str(one)], ran))
            process.start()
            process.join()
            last_line = (clone / "output.txt").read_text().splitlines()[-1]
            print(last_line, one, flush=True)
            tests |= json.loads(ran.read_text())
    return tests


def run(
    mutation: Mutation, clone: Path, tests: dict[str, dict[str, Any]], seconds: float
) -> Outcome:
    """Plant a mutation, run its tests, and remove it again.

    seconds: upper bound on the recorded seconds of the tests tried.
    """
    file = clone / mutation.file
    started = time.monotonic()
    key = f"{mutation.file}:{mutation.function}"
    near = [name for name in tests if key in tests[name]["functions"]]
    tiers = [near, running([mutation.file], tests)]
    if not near:
        tiers += [running(importers(mutation.file, clone), tests), list(tests)]
    sound = file.read_bytes()
    file.write_bytes(mutation.planted(sound))
    try:
        chosen = in_turn(tiers, tests)
        ends = itertools.accumulate(tests[name]["seconds"] for name in chosen)
        in_time = [name for name, end in zip(chosen, ends, strict=True) if end <= seconds]
        caught = failing(in_time or chosen[:1], clone, tests)
    finally:
        file.write_bytes(sound)
    return Outcome(mutation, caught, len(near), round(time.monotonic() - started, 1))


def running(
    files: list[str],
    tests: dict[str, dict[str, Any]],
) -> list[str]:
    """Return the tests that ran a function of these files."""
    starts = tuple(f"{file}:" for file in files)
    return [
        name
        for name, test in tests.items()
        if any(ran.startswith(starts) for ran in test["functions"])
    ]


def importers(file: str, clone: Path) -> list[str]:
    """Return the files of ours that import this one.

    Their tests run its compiled code, which the record does not show.
    """
    package, _, module = file.removesuffix(".py").replace("/", ".").rpartition(".")
    imported = re.compile(
        rf"{re.escape(package)}\.{module}\b|from {re.escape(package)} import [^\n]*\b{module}\b"
    )
    return [
        str(path.relative_to(clone))
        for path in (clone / "qarl").rglob("*.py")
        if imported.search(path.read_text())
    ]


def in_turn(
    tiers: list[list[str]],
    tests: dict[str, dict[str, Any]],
) -> list[str]:
    """Return each test once, tier by tier and fastest first.

    The tests of a file that must stay together keep the file's own order. Their total seconds
    decide their position.
    """
    chosen: dict[str, None] = {}
    for tier in tiers:
        groups: dict[str, list[str]] = {}
        for name in tier:
            group = name.partition("::")[0] if tests[name]["together"] else name
            groups.setdefault(group, []).append(name)
        quickest = sorted(
            groups.values(),
            key=lambda names: sum(tests[name]["seconds"] for name in names),
        )
        chosen |= dict.fromkeys(itertools.chain(*quickest))
    return list(chosen)


def failing(
    names: list[str],
    clone: Path,
    tests: dict[str, dict[str, Any]],
) -> str:
    """Return the first of these tests that fails, or "" if all pass.

    Each file that keeps its order gets a process of its own, because a process has one engine.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        group = name.partition("::")[0] if tests[name]["together"] else ""
        groups.setdefault(group, []).append(name)
    failures = (_failing(group, clone, tests) for group in groups.values())
    # a generator: groups after the first failure are not run
    return next(filter(None, failures), "")


def _failing(
    names: list[str],
    clone: Path,
    tests: dict[str, dict[str, Any]],
) -> str:
    output = clone / "output.txt"
    process = FORKS.Process(target=_pytest, args=(clone, names))
    process.start()
    try:
        process.join(120 + 4 * sum(tests[name]["seconds"] for name in names))
        late = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # the process, and all that it started
        process.join()
    if late:
        return "time limit"
    failed = [
        text for text in output.read_text().splitlines() if text.startswith(("FAILED ", "ERROR "))
    ]
    if failed:
        return failed[0].split(" - ")[0].partition(" ")[2]
    if process.exitcode == 1:  # pytest prints a failure with this status
        raise RuntimeError(f"the tests did not run, {output}:\n{output.read_text()[-2000:]}")
    return f"exit status {process.exitcode}" if process.exitcode else ""


def _pytest(clone: Path, names: list[str], ran: Path | None = None) -> None:
    """Run pytest in a fork of a process that has imported the libraries, but no module of ours.

    ran: file for the record of what each test ran.
    """
    os.setsid()
    os.chdir(clone)
    os.environ.update(alone(clone))
    sys.path.insert(0, str(clone))
    sys.dont_write_bytecode = True
    file = os.open(clone / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    calls = Calls(clone.resolve(), clone.parent / "called")
    if ran:
        calls.watch()
        start = (
            f"from calls import Calls\nCalls({str(calls.root)!r}, {str(calls.file)!r}).watch()\n"
        )
        (clone.parent / "sitecustomize.py").write_text(
            f"import sys; sys.path.append({str(SCRIPTS)!r})\n{start}"
        )
        os.environ["PYTHONPATH"] = f"{clone.parent}:{os.environ['PYTHONPATH']}"
    recorder = Recorder(calls)
    command = [
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *(names if ran else ["-x", *names]),
    ]
    status = pytest.main(command, plugins=[recorder] if ran else [])
    if ran:
        ran.write_text(json.dumps(recorder.tests))
    sys.stdout.flush()
    os._exit(status)


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
    parser.add_argument("--room", required=True, choices=ROOMS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="keep the outcomes here, and go on from what it holds"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="of tests tried on a mutation (default: all)",
    )
    parser.add_argument("--tests", nargs="+", help="files or folders instead of tests/ROOM")
    parser.add_argument(
        "--survivors",
        type=Path,
        metavar="JSON",
        help="plant what survived there, drawing nothing",
    )
    options = parser.parse_args()
    # SIGTERM then raises, so that the processes started here are ended too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    paths = options.tests or [f"tests/{options.room}"]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    same = {"commit": commit.strip(), "room": options.room, "tests": paths}
    saved: dict[str, Any] = {**same, "outcomes": []}
    if options.json and options.json.exists():
        saved = json.loads(options.json.read_text())
    if {name: saved.get(name) for name in same} != same:
        parser.error(
            f"{options.json} holds outcomes of another commit, room or tests; name another file"
        )
    earlier: dict[str, Any] = {**same, "outcomes": []}
    if options.survivors:
        earlier = json.loads(options.survivors.read_text())
    if any(earlier[name] != same[name] for name in ("commit", "room")):
        parser.error(
            f"{options.survivors} holds survivors of another commit or room; check that commit out"
        )
    # not at the top: forks run the top of this file, and must import the clone's qarl
    from qarl.cli.environment import quiet_libraries

    quiet_libraries()
    os.environ.update(THREADS)
    FORKS.set_forkserver_preload(list(LIBRARIES))
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        clone = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        if "ran" not in saved:
            saved["ran"] = record(paths, clone)
        drawn = [
            asdict(mutation) for mutation in draw(options.room, options.count, options.seed, clone)
        ]
        if options.survivors:
            drawn = [
                outcome["mutation"] for outcome in earlier["outcomes"] if not outcome["caught_by"]
            ]
        for mutation in drawn:
            if all(outcome["mutation"] != mutation for outcome in saved["outcomes"]):
                saved["outcomes"].append(
                    asdict(run(Mutation(**mutation), clone, saved["ran"], options.seconds))
                )
                print(line(saved["outcomes"][-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return report(
        [outcome for outcome in saved["outcomes"] if outcome["mutation"] in drawn],
        options.room,
    )


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
        f" {outcome['seconds']} s]"
    )


def report(outcomes: list[dict[str, Any]], room: str) -> int:
    """Print survivors, time limits and the score; return 1 if a mutation survived."""
    survivors = [outcome for outcome in outcomes if not outcome["caught_by"]]
    late = [outcome for outcome in outcomes if outcome["caught_by"] == "time limit"]
    for title, some in (
        ("survivors", survivors),
        ("caught by the time limit alone", late),
    ):
        print(
            f"\n{len(some)} {title}",
            *(f"  {line(outcome)}" for outcome in some),
            sep="\n",
        )
    print(f"\n{room}: {len(outcomes) - len(survivors)} of {len(outcomes)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
