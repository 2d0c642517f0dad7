#!/usr/bin/env python3
"""Break runs at random moments and check that they recover.

    scripts/faults.py --kills 25 --disks 10 --servers 10 --signals 20 --combinations 110 --seed S
        [--json FILE]

Nothing may be lost, no process left, no traceback shown, and no socket opened.

- kills: SIGKILL at a random moment of a run, half of the time to the process that was started,
  otherwise to any other process of its tree.
- disks: the run's folder is on a file system of its own that is full from a random moment on. This
  needs `unshare -rm`.
- servers: SIGKILL to any process of a run's two servers.
- signals: SIGTERM, SIGUSR1 or SIGHUP at a random moment to every process of a run's tree, as a
  scheduler sends it. A run that had begun its steps has a checkpoint of the last one then. Of five
  trials three are in one process, one in two processes, and one on a server.
- combinations: random options, of `tests.runs.test_combinations`.

Every second trial is broken after its first checkpoint, so that it resumes from one (not those of
combinations).

A broken run either ends by itself with one line or goes on. A run that ended is resumed. Metrics
and exported tensors must equal those of an undisturbed run to the last bit. Every process seen
below the run must be gone 20 s after it, and no socket may listen beyond loopback. Exit status: 0
if all trials passed, otherwise 1. --json saves the outcomes and continues from them.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.runs.test_combinations import (  # noqa: E402
    SIZES,
    draw,
    refusals,
    stopped_by_other_experts,
)
from tests.support.runs import Run, lines  # noqa: E402

SMALL = [
    "--steps",
    "4",
    "--prompts",
    "8",
    "--samples",
    "4",
    "--eval.problems",
    "16",
    "--eval-every",
    "2",
    "--checkpoint-every",
    "2",
    "--mini-batches",
    "2",
]
RUNS = {
    "default": "",
    "w8a8, LoRA": "--scheme w8a8 --learner.lora.name lora",
    "fp8, mixture": "--scheme fp8 --model tiny-qwen3-moe",
    "two processes": "--processes 2",
    "a server": "--rollout.servers 1",
    "two servers": "--rollout.servers 2",
}
KINDS = ("kills", "disks", "servers", "signals", "combinations")
SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SIGNALLED = ("default", "default", "two processes", "default", "a server")
"""Runs of consecutive trials of signals."""


@dataclass
class Outcome:
    """Outcome of one trial."""

    kind: str
    number: int
    """Number of the trial among those of its seed and kind."""
    run: str
    seed: int = 0
    broken: str = ""
    ended: str = ""
    resumed: str = ""
    faults: list[str] = field(default_factory=list)
    """Violations; empty if everything held."""
    seconds: float = 0.0


class Watch:
    """Watch on the processes below a run (five times a second) and its sockets (every second).

    Only sockets that listen beyond loopback are recorded.
    """

    def __init__(self, pid: int) -> None:
        self.seen: dict[tuple[int, float], psutil.Process] = {}
        self.listening = set[str]()
        self._root = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        looks = 0
        while not self._over.wait(0.2):
            alive = self.alive()
            looks += 1
            # sockets take longer to list: every fifth time, so once a second
            for process in alive if looks % 5 == 0 else ():
                with suppress(psutil.Error):
                    self._note_sockets(process)

    def _note_sockets(self, process: psutil.Process) -> None:
        for socket in process.net_connections("inet"):
            listens = socket.status == psutil.CONN_LISTEN
            if listens and socket.laddr.ip not in ("127.0.0.1", "::1"):
                self.listening.add(f"{socket.laddr.ip} of {' '.join(process.cmdline())[:80]}")

    def alive(self) -> list[psutil.Process]:
        """Return the processes of the tree that are alive, the run itself first."""
        with suppress(psutil.Error):
            for process in [self._root, *self._root.children(recursive=True)]:
                self.seen.setdefault((process.pid, process.create_time()), process)
        return [process for process in list(self.seen.values()) if _lives(process)]

    def end(self) -> list[str]:
        """Stop watching and return faults: processes that are alive after 20 s, and sockets."""
        self._over.set()
        self._thread.join()
        deadline = time.monotonic() + 20
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        faults = [f"left: {' '.join(process.cmdline())[:120]}" for process in left]
        for process in left:
            process.kill()
        return [*faults, *(f"listens at {name}" for name in sorted(self.listening))]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def result(run: Path) -> dict[str, Any]:
    """Return the data in which equal runs agree.

    They are the metrics without times, and the SHA-256 of the exported tensors.
    """
    files = sorted((run / "export").glob("*.safetensors"))
    return {
        "metrics": lines(run),
        "export": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }


def broken(
    outcome: Outcome,
    arguments: list[str],
    breaks: Callable[[Watch], str],
) -> int:
    """Run one command, break it by calling `breaks` in a thread, and return its exit status."""
    run = Run(*arguments)
    watch = Watch(run.pid)
    descriptions: list[str] = []
    thread = threading.Thread(target=lambda: descriptions.append(breaks(watch)), daemon=True)
    thread.start()
    status, text = _ended(run, outcome)
    thread.join()
    outcome.broken = descriptions[0]
    outcome.ended = f"status {status}: {text}"
    outcome.faults += watch.end()
    return status


def _ended(run: Run, outcome: Outcome) -> tuple[int, str]:
    late = threading.Timer(400, lambda: _kill_late(run, outcome))
    late.start()
    done = run.wait()
    late.cancel()
    if "Traceback" in done.stdout + done.stderr:
        outcome.faults.append(f"traceback: {(done.stdout + done.stderr)[-3000:]}")
    text = " ".join((done.stderr or done.stdout).split())
    return done.returncode, text[-400:]


def _kill_late(run: Run, outcome: Outcome) -> None:
    outcome.faults.append("did not end in 400 s")
    for process in [
        *psutil.Process(run.pid).children(recursive=True),
        psutil.Process(run.pid),
    ]:
        with suppress(psutil.Error):
            process.kill()


def resumed(outcome: Outcome, run: Path, arguments: list[str]) -> int:
    """Finish a run and return its exit status.

    The run continues from its newest checkpoint, or starts anew if it has none.
    """
    begun = checkpoints(run)
    if not begun:
        shutil.rmtree(run, ignore_errors=True)
    command = Run("train", "--resume", run) if begun else Run(*arguments)
    watch = Watch(command.pid)
    status, text = _ended(command, outcome)
    outcome.faults += watch.end()
    outcome.resumed = f"{'resumed' if begun else 'anew'}, status {status}"
    if status:
        outcome.faults.append(f"{outcome.resumed}: {text}")
    return status


def compared(outcome: Outcome, run: Path, sound: dict[str, Any]) -> None:
    """Compare a run with the undisturbed one, and record any difference as a fault."""
    computed = result(run)
    outcome.faults += [
        f"{name} differ from those of a run left alone"
        for name in sound
        if computed[name] != sound[name]
    ]
    if not computed["export"]:
        outcome.faults.append("nothing exported")


@dataclass(frozen=True)
class Alone:
    """Undisturbed run."""

    result: dict[str, Any]
    seconds: float
    """Seconds to its end."""
    checkpointed: float
    """Seconds to its first checkpoint."""


@dataclass(frozen=True)
class Moment:
    """Moment at which a run is broken."""

    resumable: bool
    """Whether `seconds` count from the run's first checkpoint, instead of from its start."""
    seconds: float
    alone: Alone

    @classmethod
    def drawn(cls, rng: random.Random, number: int, alone: Alone) -> "Moment":
        """Draw a moment; every second trial's is after the first checkpoint."""
        resumable = number % 2 == 1
        longest = alone.seconds - alone.checkpointed * resumable
        return cls(resumable, rng.uniform(0, longest), alone)

    def wait(self, run: Path, watch: Watch) -> None:
        """Wait until the moment, or until the run has ended."""
        while self.resumable and not checkpoints(run) and watch.alive():
            time.sleep(0.02)
        time.sleep(self.seconds)

    def __str__(self) -> str:
        after = " after the first checkpoint" if self.resumable else ""
        return f"at {self.seconds:.1f} s{after} of {self.alone.seconds:.1f} s"


def checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run."""
    return list(run.glob("checkpoints/step-*/manifest.json"))


class Trials:
    """Trials of one seed. folder: where runs are written."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._sound: dict[str, Alone] = {}
        Run("--version").wait()  # starts the fork server, so that no run's seconds include that

    def _alone(self, name: str) -> Alone:
        if name not in self._sound:
            run = self._folder / "alone"
            began = time.time()
            done = Run("train", *SMALL, *RUNS[name].split(), "--output", run).wait()
            if done.returncode:
                raise RuntimeError(
                    f"{name}, left alone, ended with status {done.returncode}:\n{done.stderr}"
                )
            first = min(manifest.stat().st_mtime for manifest in checkpoints(run))
            computed = result(run)
            self._sound[name] = Alone(computed, time.time() - began, first - began)
            shutil.rmtree(run)
        return self._sound[name]

    def run(self, kind: str, number: int) -> Outcome:
        """Run one trial, drawn from seed, kind and number."""
        began = time.monotonic()
        run = self._folder / "run"
        rng = random.Random(f"{self._seed} {kind} {number}")
        outcome = getattr(self, f"_{kind}")(number, run, rng)
        outcome.seed = self._seed
        outcome.seconds = round(time.monotonic() - began, 1)
        shutil.rmtree(run, ignore_errors=True)
        return outcome

    def _kills(self, number: int, run: Path, rng: random.Random) -> Outcome:
        name = rng.choice([name for name in RUNS if name != "two servers"])
        return self._killed(Outcome("kills", number, name), run, rng, root=rng.random() < 0.5)

    def _servers(self, number: int, run: Path, rng: random.Random) -> Outcome:
        return self._killed(Outcome("servers", number, "two servers"), run, rng, root=False)

    def _killed(
        self,
        outcome: Outcome,
        run: Path,
        rng: random.Random,
        root: bool,
    ) -> Outcome:
        alone = self._alone(outcome.run)
        moment = Moment.drawn(rng, outcome.number, alone)
        pick = rng.random()

        def kill(watch: Watch) -> str:
            moment.wait(run, watch)
            tree = watch.alive()
            others = [
                process for process in tree[1:] if outcome.kind != "servers" or _serves(process)
            ]
            with suppress(psutil.Error, IndexError):  # raised if no process is left
                victim = tree[0] if root or not others else others[int(pick * len(others))]
                name = " ".join(victim.cmdline())[:80]
                victim.kill()
                return f"{'the run' if victim is tree[0] else name} {moment}"
            return "it had ended"

        arguments = ["train", *SMALL, *RUNS[outcome.run].split(), "--output", str(run)]
        if broken(outcome, arguments, kill) == 0 or resumed(outcome, run, arguments) == 0:
            compared(outcome, run, alone.result)
        return outcome

    def _signals(self, number: int, run: Path, rng: random.Random) -> Outcome:
        outcome = Outcome("signals", number, SIGNALLED[number % len(SIGNALLED)])
        alone = self._alone(outcome.run)
        moment = Moment.drawn(rng, number // len(SIGNALLED), alone)
        stop = rng.choice(SIGNALS)

        def send(watch: Watch) -> str:
            moment.wait(run, watch)
            tree = watch.alive()
            for process in tree:
                with suppress(psutil.Error):
                    process.send_signal(stop)
            return f"{stop.name} to {len(tree)} processes {moment}"

        arguments = ["train", *SMALL, *RUNS[outcome.run].split(), "--output", str(run)]
        status = broken(outcome, arguments, send)
        if status not in (0, 128 + stop):
            outcome.faults.append(f"status {status}, not {128 + stop}")
        steps = len(lines(run)) if (run / "metrics.jsonl").exists() else 0
        if steps and not list(run.glob(f"checkpoints/step-{steps:06}/manifest.json")):
            outcome.faults.append(f"no checkpoint of step {steps}, the last one")
        if status == 0 or resumed(outcome, run, arguments) == 0:
            compared(outcome, run, alone.result)
        return outcome

    def _disks(self, number: int, run: Path, rng: random.Random) -> Outcome:
        name = rng.choice([name for name in RUNS if name != "two servers"])
        alone = self._alone(name)
        moment = Moment.drawn(rng, number, alone)
        spare = rng.choice([0, 4096, 100_000])
        outcome = Outcome("disks", number, name)
        disk = self._folder / "disk"
        disk.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", disk], check=True)
        ballast = disk / "ballast"

        def fill(watch: Watch) -> str:
            moment.wait(disk / "run", watch)
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            os.truncate(ballast, max(0, ballast.stat().st_size - spare))
            return f"full but for {spare} bytes {moment}"

        arguments = [
            "train",
            *SMALL,
            *RUNS[name].split(),
            "--output",
            str(disk / "run"),
        ]
        try:
            status = broken(outcome, arguments, fill)
            ballast.unlink()
            if status == 0 or resumed(outcome, disk / "run", arguments) == 0:
                compared(outcome, disk / "run", alone.result)
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
        return outcome

    def _combinations(self, number: int, run: Path, rng: random.Random) -> Outcome:
        combination = draw(rng.randrange(10**9))
        outcome = Outcome("combinations", number, str(combination))
        reasons = refusals(combination)
        arguments = [
            "train",
            *combination.arguments(),
            *SIZES,
            "--steps",
            "2",
            "--output",
            str(run),
        ]
        moment = rng.uniform(0, 8) if number % 3 == 0 else None

        def kill(watch: Watch) -> str:
            if moment is None:
                return "nothing"
            time.sleep(moment)
            with suppress(psutil.Error, IndexError):
                watch.alive()[0].kill()
                return f"the run at {moment:.1f} s"
            return "it had ended"

        status = broken(outcome, arguments, kill)
        if stopped_by_other_experts(combination, outcome.ended):
            return outcome
        if status == 2:
            if not any(reason in outcome.ended for reason in reasons):
                outcome.faults.append(f"refused without a reason known: {outcome.ended}")
            return outcome
        if status:
            status = resumed(outcome, run, arguments)
        if status == 0 and reasons:
            outcome.faults.append(f"not refused: {reasons}")
        if status == 0:
            steps = [line["step"] for line in lines(run)]
            if steps != [1, 2] or not (run / "export").is_dir():
                outcome.faults.append("two steps and an export expected")
        return outcome


def _serves(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("vllm" in part.lower() for part in process.cmdline())
    return False


def main() -> int:
    """Run the trials, print each of them, and then list the faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="keep the outcomes here, and go on from what it holds"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has runs ignore it
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # forks inherit no threads
    saved: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        saved = json.loads(options.json.read_text())
    if any(row["seed"] != options.seed for row in saved):
        parser.error(f"{options.json} holds outcomes of another seed; name another file")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trials = Trials(Path(folder), options.seed)
        counts = {kind: getattr(options, kind) for kind in KINDS}
        planned = [
            (number / count, kind, number)
            for kind, count in counts.items()
            for number in range(count)
        ]
        # kinds alternate, so that an interrupted run has trials of all of them
        for _, kind, number in sorted(planned):
            if any((row["kind"], row["number"]) == (kind, number) for row in saved):
                continue
            saved.append(asdict(trials.run(kind, number)))
            print(json.dumps(saved[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(saved, indent=1) + "\n")
    wrong = [row for row in saved if row["faults"]]
    print(
        f"{len(saved)} trials, {len(wrong)} with faults",
        *(json.dumps(row, indent=1) for row in wrong),
        sep="\n",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
