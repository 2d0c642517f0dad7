#!/usr/bin/env python3
"""Run `qarl train` on two servers, each time with a fault, and check that nothing is lost.

    python scripts/server_faults.py [--runs 100] [--seed 0] [--transfer http] [--only TEXT]
        [--minutes 5] [--keep FILE] [--json FILE]

Every fault runs at every phase once, followed by faults drawn at random. The script reports what
was noticed, when, and whether anything was lost. Network faults and bad answers come from a proxy
before each server. Servers are killed, stopped, restarted or short of memory; learners are killed
at a line of a publish or run out of disk. There are two right results: the run goes on and equals
the run without a fault in every metric and digest, or it stops with one line and the resumed run
equals it. Finished runs are saved in FILE of --keep: the same command continues from them.

Exit status: 0 if every run had a right result, otherwise 1.
"""

import argparse
import contextlib
import json
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.random_policy import random_policy  # noqa: E402
from qarl.report.record import record  # noqa: E402
from qarl.report.run_folder import RunFolder  # noqa: E402
from qarl.rollout.engine import EngineError  # noqa: E402
from qarl.rollout.servers.engine import ServerEngine  # noqa: E402
from qarl.rollout.vllm.options import VllmOptions, prepare_environment  # noqa: E402
from qarl.run.policy import open_policy  # noqa: E402
from qarl.sync.export import export_checkpoint  # noqa: E402
from scripts.server_farm import KEY, Farm  # noqa: E402
from tests.support.fault_proxy import ANSWERS, NETWORK, PHASES, SENDING, Fault  # noqa: E402
from tests.support.learner_faults import VARIABLE  # noqa: E402
from tests.support.runs import SMALL, Run, lines  # noqa: E402

PLANTED = {"planted_by": "scripts.publish_faults"}
SECONDS = 8.0
"""`rollout.server_seconds`: hangs are noticed sooner than with its default, in the same manner."""
DYING = 24
"""Number of learners that are killed, each at another line."""
SERVER_FAULTS = {
    "server killed": ("stage", "commit", "canary", "sample"),
    "server restarted": ("stage", "commit", "sample"),
    "engine killed": ("stage", "commit", "sample"),
    "engine stopped": ("stage", "commit", "canary", "sample"),
    "no memory": ("stage",),
    "second learner": ("stage", "commit", "sample"),
}
SENT = [
    *NETWORK,
    SENDING,
    "server killed",
    "server restarted",
    "engine killed",
    "engine stopped",
    "second learner",
]
"""Faults of the phase in which versions are sent over HTTP."""


@dataclass(frozen=True)
class Case:
    """One run and its fault."""

    number: int
    kind: str
    """Name of the fault."""
    phase: str
    """Phase of a step in which the fault occurs."""
    at: float
    """Position of the fault among the phase's requests or the publish's lines.

    It is a fraction of their number.
    """
    server: int
    """Index of the server concerned."""
    staleness: int


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    case: Case
    result: str
    """One of "went on", "resumed", "started again" (before the first checkpoint) and "FAILED"."""
    noticed: float | None
    """Seconds from the fault to the first line about it; None if there was nothing to notice."""
    line: str
    """That line."""
    equal: bool
    """Whether metrics and digests equal those of the run without a fault."""
    lost: int
    """Number of finished completions that the run's results lack."""
    seconds: float


def cases(count: int, seed: int, transfer: str) -> list[Case]:
    """Return every fault at every phase, in an order drawn by `seed`, followed by drawn ones."""
    chance = random.Random(seed)
    every = [(kind, phase) for kind in NETWORK for phase in PHASES] + [
        (kind, "sample") for kind in ANSWERS
    ]
    every += [(kind, phase) for kind, phases in SERVER_FAULTS.items() for phase in phases]
    every += [("learner killed", "publish")] * DYING + [("disk full", "publish")] * 2
    every += [(kind, "send") for kind in SENT] if transfer == "http" else []
    chance.shuffle(every)
    every += [chance.choice(every) for _ in range(count - len(every))]
    return [
        Case(
            number,
            kind,
            phase,
            chance.random(),
            chance.randrange(2),
            chance.randrange(2),
        )
        for number, (kind, phase) in enumerate(every[:count])
    ]


class Trial:
    """One case: arm the fault, run, and compare."""

    def __init__(
        self,
        case: Case,
        farm: Farm,
        options: list[str],
        folder: Path,
        counts: dict[str, Any],
    ):
        self._case = case
        self._farm = farm
        self._options = options
        self._counts = counts
        self._folder = folder / f"run-{case.number}"
        self._log = folder / f"log-{case.number}"
        self._second: list[str] = []
        self._learner: Run | None = None

    def run(self, whole: list[dict[str, Any]]) -> Outcome:
        """Run the case and return its outcome. whole: metrics of the run without a fault."""
        begun = time.monotonic()
        os.environ[VARIABLE] = json.dumps(
            {**PLANTED, "log": str(self._log), **self._learners_fault()}
        )
        if self._case.kind in (*NETWORK, *ANSWERS, *SERVER_FAULTS, SENDING):
            self._farm.proxies[self._case.server].reset(self._servers_fault())
        done = self._made("train", *self._options, "--output", str(self._folder))
        ended = time.time()
        struck = self._struck()
        noted = [] if struck is None else self._noted(struck)
        result = "went on"
        problem = _problem(done)
        if done.returncode:
            result, problem = self._again(problem)
            noted.append((ended, problem if problem else _last_line(done)))
        equal = problem == "" and self._folder.exists() and lines(self._folder) == whole
        if struck is None:
            result = "FAILED"
            equal = False
            noted = [(ended, "the fault was not met")]
        if self._second and "takes its weights from" not in self._second[0]:
            equal = False
            noted = [(ended, self._second[0])]
        lost = 0
        if not equal:
            lost = sum(a != b for a, b in zip(lines(self._folder), whole, strict=False))
        first = min(noted, default=None)
        noticed = None
        if first is not None and struck is not None:
            noticed = round(max(first[0] - struck, 0.0), 1)
        outcome = Outcome(
            case=self._case,
            result=result if equal else "FAILED",
            noticed=noticed,
            line=" ".join(first[1].split())[:300] if first else "",
            equal=equal,
            lost=lost,
            seconds=round(time.monotonic() - begun, 1),
        )
        if outcome.result == "FAILED":
            print(done.stdout[-1500:], done.stderr[-3000:], sep="\n", file=sys.stderr)
        shutil.rmtree(self._folder, ignore_errors=True)
        return outcome

    def _again(self, problem: str) -> tuple[str, str]:
        """Run again after a run that stopped."""
        self._farm.make_sound()
        os.environ[VARIABLE] = json.dumps({"log": str(self._log)})
        if any((self._folder / "checkpoints").glob("step-*")):
            if problem:
                return "resumed", problem
            done = self._made("train", "--resume", str(self._folder))
            return "resumed", _problem(done, ended=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        done = self._made("train", *self._options, "--output", str(self._folder))
        return "started again", problem or _problem(done, ended=True)

    def _made(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self._learner = Run(*arguments)
        while self._learner.poll() is None:
            with contextlib.suppress(queue.Empty):
                self._farm.todo.get(timeout=0.02)()
        return self._learner.wait()

    def _learners_fault(self) -> dict[str, Any]:
        case = self._case
        version = 1 + int(case.at * 3)
        if case.kind == "learner killed":
            count = self._counts["lines"]
            return {
                "version": version,
                "die_at": 1 + int(random.Random(case.number).random() * count),
            }
        return {"full_disk": version} if case.kind == "disk full" else {}

    def _servers_fault(self) -> Fault:
        case = self._case
        number = 1 + int(case.at * self._counts[case.phase])
        acts = {name: getattr(self, "_" + name.replace(" ", "_")) for name in SERVER_FAULTS}
        return Fault(case.kind, case.phase, number, acts.get(case.kind))

    def _struck(self) -> float | None:
        planted = [at for at, message in self._noted(0) if message.startswith("PLANTED")]
        return self._farm.proxies[self._case.server].struck or (planted[0] if planted else None)

    def _noted(self, since: float) -> list[tuple[float, str]]:
        if not self._log.exists():
            return []
        read = [json.loads(line) for line in self._log.read_text().splitlines()]
        noted = [(line["time"], line["message"]) for line in read if line["time"] >= since]
        return [(at, text) for at, text in noted if since == 0 or not text.startswith("PLANTED")]

    def _server_killed(self) -> None:
        self._farm.kill(self._case.server)

    def _server_restarted(self) -> None:
        """Restart a server with its initial weights while the learner sleeps."""
        self._farm.kill(self._case.server)
        assert self._learner is not None
        learner = self._learner.pid
        os.kill(learner, signal.SIGSTOP)

        def restart() -> None:
            self._farm.restart(self._case.server)
            os.kill(learner, signal.SIGCONT)

        self._farm.todo.put(restart)

    def _engine_killed(self) -> None:
        """Kill the engine as the system does when memory runs out."""
        self._farm.engine(self._case.server).kill()

    def _engine_stopped(self) -> None:
        self._farm.engine(self._case.server).suspend()

    def _no_memory(self) -> None:
        engine = self._farm.engine(self._case.server)
        engine.rlimit(resource.RLIMIT_AS, (engine.memory_info().vms // 2, resource.RLIM_INFINITY))

    def _second_learner(self) -> None:
        """Let another run ask for the server meanwhile."""
        farm = self._farm
        folder = self._folder
        url = farm.servers[self._case.server].url

        def ask() -> None:
            try:
                options = VllmOptions(
                    farm.options.rollout.model_copy(update={"server_seconds": SECONDS})
                )
                ServerEngine([url], KEY, folder, farm.checkpoint, options, "another run").close()
                self._second.append("a second learner was not refused")
            except EngineError as error:
                self._second.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(timeout=SECONDS)


def _problem(done: "subprocess.CompletedProcess[str]", ended: bool = False) -> str:
    """Return what is wrong with a run's end; "" if it printed one line, or nothing."""
    if "Traceback" in done.stderr and done.returncode != -signal.SIGKILL:
        return f"a traceback: {_last_line(done)}"
    return f"resumed, and stopped again: {_last_line(done)}" if ended and done.returncode else ""


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    printed = [line for line in done.stderr.splitlines() if line.strip()]
    return (
        printed[-1] if printed and done.returncode > 0 else f"ended with status {done.returncode}"
    )


@contextlib.contextmanager
def set_up(
    folder: Path, transfer: str
) -> Iterator[tuple[Farm, Callable[[Case], list[str]], dict[int, Any], dict[str, Any]]]:
    """Start the servers and make the runs without a fault.

    Yields the servers, a function from a case to a run's options, the results without a fault by
    staleness, and the numbers of requests of each phase and of lines of a publish.
    """
    os.environ["QARL_SERVER_KEY"] = KEY
    prepare_environment()
    with random_policy("random-qwen3", 0) as policy:
        base = [
            *SMALL,
            "--model",
            str(policy),
            "--scheme",
            "w4a16",
            "--layers",
            "lm_head=w8a8",
            "--task",
            "chain_sum",
            "--reward",
            "tests.support.rewards:reward",
            "--rollout.max_prompt_tokens",
            "64",
            "--max-new-tokens",
            "8",
            "--learner.micro_batch_tokens",
            "512",
            "--export",
            "false",
            "--sync.canary_every",
            "1",
            "--checkpoint-every",
            "1",
            "--eval.problems",
            "0",
        ]
        base = base[: base.index("--eval-every")] + base[base.index("--eval-every") + 2 :]
        inside = Run("train", *base, "--output", str(folder / "inside")).wait()
        assert inside.returncode == 0, inside.stderr
        config = RunFolder(folder / "inside").config()
        policy = open_policy(config)
        export_checkpoint(policy.model, policy.folder, folder / "checkpoint")
        options = VllmOptions(config.rollout, config.dtype)
        farm = Farm(folder / "checkpoint", options, folder / "servers")
        served = [
            *base,
            "--rollout.servers",
            farm.urls(),
            "--rollout.server_transfer",
            transfer,
        ]

        def options_of(case: Case, seconds: float = SECONDS) -> list[str]:
            return [
                *served,
                "--rollout.max_staleness",
                str(case.staleness),
                "--rollout.server_seconds",
                str(seconds),
            ]

        try:
            whole = {}
            counts = {}
            for staleness in (0, 1):
                output = folder / f"whole-{staleness}"
                count = folder / "count"
                planted = {
                    **PLANTED,
                    "log": str(folder / "log"),
                    "version": 2,
                    "count": str(count),
                }
                os.environ[VARIABLE] = json.dumps(planted)
                # a longer timeout, because the first requests compile
                options_alone = options_of(Case(0, "", "", 0, 0, staleness), 120.0)
                done = Run("train", *options_alone, "--output", str(output)).wait()
                assert done.returncode == 0, done.stderr
                whole[staleness] = lines(output)
                counts = {**farm.proxies[0].counts, "lines": int(count.read_text())}
                farm.make_sound()
            assert whole[0] == [{**line} for line in lines(folder / "inside")], (
                "servers alone change a run"
            )
            yield farm, options_of, whole, counts
        finally:
            farm.close()


def summary(outcomes: list[Outcome]) -> str:
    """Return a line for each fault."""
    rows = []
    for kind in dict.fromkeys(outcome.case.kind for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome.case.kind == kind]
        results = ", ".join(
            f"{sum(outcome.result == result for outcome in of_kind)} {result}"
            for result in ("went on", "resumed", "started again", "FAILED")
            if any(outcome.result == result for outcome in of_kind)
        )
        latest = max(
            (outcome.noticed for outcome in of_kind if outcome.noticed is not None),
            default=None,
        )
        seconds = "nothing noticed" if latest is None else f"noticed within {latest:.1f} s"
        rows.append(f"{kind:24} {len(of_kind):3} runs: {results}; {seconds}")
    return "\n".join(rows)


def main() -> int:
    """Make the runs and print their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--transfer",
        choices=["files", "http"],
        default="files",
        help="rollout.server_transfer",
    )
    parser.add_argument("--only", default="", help="faults with this text in them")
    parser.add_argument(
        "--minutes",
        type=float,
        default=600,
        help="to stop after; the same command goes on",
    )
    parser.add_argument("--keep", type=Path, help="file of the runs that were made")
    parser.add_argument("--json", type=Path, help="write a record")
    known = parser.parse_args()
    chosen = [
        case
        for case in cases(known.runs, known.seed, known.transfer)
        if known.only in f"{case.kind} {case.phase}"
    ]
    outcomes_by_number = _kept(known.keep)
    begun = time.monotonic()
    left = [case for case in chosen if case.number not in outcomes_by_number]
    if left:
        with (
            tempfile.TemporaryDirectory(prefix="qarl-faults-") as folder,
            set_up(Path(folder), known.transfer) as parts,
        ):
            farm, options_of, whole, counts = parts
            for case in left:
                outcome = Trial(case, farm, options_of(case), Path(folder), counts).run(
                    whole[case.staleness]
                )
                farm.make_sound()
                outcomes_by_number[case.number] = outcome
                print(
                    f"{outcome.result:13} {outcome.seconds:5.1f} s  {case.kind} at {case.phase}:"
                    f" {outcome.line}"
                )
                sys.stdout.flush()
                if known.keep:
                    with known.keep.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
                if time.monotonic() - begun > 60 * known.minutes:
                    break
    outcomes = [
        outcomes_by_number[case.number] for case in chosen if case.number in outcomes_by_number
    ]
    print(summary(outcomes))
    print(f"{len(outcomes)} of {len(chosen)} runs made")
    if known.json:
        data = {"runs": [asdict(outcome) for outcome in outcomes]}
        arguments = ["--runs", str(known.runs), "--seed", str(known.seed)]
        arguments += ["--transfer", known.transfer] if known.transfer != "files" else []
        arguments += ["--only", known.only] if known.only else []
        written = record(arguments, data)
        written["command"] = written["command"].replace(
            "qarl", "python scripts/server_faults.py", 1
        )
        known.json.write_text(json.dumps(written, indent=2) + "\n")
    return int(any(outcome.result == "FAILED" for outcome in outcomes))


def _kept(file: Path | None) -> dict[int, Outcome]:
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    outcomes = [Outcome(**{**row, "case": Case(**row["case"])}) for row in rows]
    return {outcome.case.number: outcome for outcome in outcomes}


if __name__ == "__main__":
    sys.exit(main())
