#!/usr/bin/env python3
"""Plant small faults one at a time and see whether the tests catch them.

    scripts/plant_faults.py [--only TEXT] [--workers 2] [--json FILE]

scripts/faults.yaml lists them: what breaks, the file, the text and what it becomes, and the tests that a person who
touched that file would run. Each fault is planted in a scratch clone; those tests run first, then the room's, until one
fails. A fault whose text is no longer found exactly once is an error: the list is kept with the code.

Run the whole suite before: a test that fails anyway would catch everything.

Exit status: 0 all caught, 1 some not, 2 a fault that cannot be planted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("faults.yaml")


@dataclass(frozen=True)
class Fault:
    """what: in words. file, old, new: the replacement. tests: run in this order, files or folders."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The top folder it is planted in."""
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Outcome:
    """caught_by: the first failing test; "" where all passed. seconds: of wall time."""

    what: str
    file: str
    caught_by: str
    seconds: float


def main() -> int:
    """Plant every fault and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose file or description holds this text")
    parser.add_argument("--workers", type=int, default=2, help="clones that work at once (default 2)")
    parser.add_argument("--json", type=Path, help="write the table as JSON too")
    parser.add_argument("--check", action="store_true", help="only see whether every fault can be planted")
    known = parser.parse_args()
    faults = [fault for fault in read() if known.only in fault.file + fault.what]
    misplaced = [fault for fault in faults if (ROOT / fault.file).read_text().count(fault.old) != 1]
    for fault in misplaced:
        print(f"{fault.file}: the text of {fault.what!r} is not there exactly once", file=sys.stderr)
    if misplaced or known.check:
        return 2 if misplaced else 0
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        clones: Queue[Path] = Queue()
        for number in range(known.workers):
            clones.put(clone(Path(scratch) / str(number)))

        def plant(fault: Fault) -> Outcome:
            folder = clones.get()
            try:
                outcome = try_one(fault, folder)
            finally:
                clones.put(folder)
            print(line(outcome), flush=True)
            return outcome

        with ThreadPoolExecutor(known.workers) as pool:
            outcomes = list(pool.map(plant, faults))
    missed = [outcome for outcome in outcomes if not outcome.caught_by]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults caught")
    if known.json:
        known.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    return 1 if missed else 0


def read() -> list[Fault]:
    """The list, in order."""
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in yaml.safe_load(LIST.read_text())]


def clone(folder: Path) -> Path:
    """A scratch clone of HEAD with an environment of its own."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    subprocess.run(["make", "--no-print-directory", "env"], cwd=folder, check=True, capture_output=True)
    return folder


def try_one(fault: Fault, folder: Path) -> Outcome:
    """Plant, test, take out again."""
    file, started = folder / fault.file, time.monotonic()
    sound = file.read_text()
    file.write_text(sound.replace(fault.old, fault.new))
    try:
        caught = next(filter(None, (failing(tests, folder, fault.what) for tests in fault.tests)), "")
    finally:
        file.write_text(sound)
    return Outcome(fault.what, fault.file, caught, round(time.monotonic() - started, 1))


def failing(tests: str, folder: Path, what: str) -> str:
    """The first test of a file or folder that fails in a clone; "" where all pass."""
    command = [str(folder / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode in (4, 5):  # pytest's "usage error" and "no tests": nothing was tried
        raise SystemExit(f"{what!r}: pytest ran no test of {tests}:\n{done.stdout[-2000:]}")
    failed = [text for text in done.stdout.splitlines() if text.startswith(("FAILED ", "ERROR "))]
    if failed:
        return failed[0].split(" - ")[0].partition(" ")[2]
    return f"exit status {done.returncode}" if done.returncode else ""  # a crash has no line of its own


def line(outcome: Outcome) -> str:
    """One row of the table."""
    verdict = "caught" if outcome.caught_by else "MISSED"
    return f"{verdict}  {outcome.seconds:6.1f} s  {outcome.what}  [{outcome.caught_by}]"


if __name__ == "__main__":
    sys.exit(main())
