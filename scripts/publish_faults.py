"""Faults of a learner's publish, for `scripts/server_faults.py`.

`tests.support.learner_faults` plants them.
"""

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.learner_faults import note

_PUBLISH = ("sync/publisher.py", "rollout/servers/")
"""Files whose lines count as lines of a publish."""


def plant(fault: dict[str, Any]) -> None:
    """Plant a fault in this process.

    Keys of `fault`:
        log: file to which the fault is reported.
        die_at: line of a publish at which the process is killed.
        count: file for the number of lines of a publish.
        version: the publish concerned, by the weight version it makes.
        full_disk: version whose files do not fit on the disk.
    """
    if "full_disk" in fault:
        _fill_disk(fault["full_disk"], Path(fault["log"]))
    if "die_at" in fault or "count" in fault:
        _trace(
            fault["version"],
            fault.get("die_at"),
            fault.get("count"),
            Path(fault["log"]),
        )


def _fill_disk(version: int, log: Path) -> None:
    """Limit files to 512 bytes while this version is written."""
    from qarl.rollout.servers import versions

    write = versions._write

    def without_room(parent: Path, number: int, make: Any) -> Any:
        if number != version:
            return write(parent, number, make)
        note(log, "PLANTED")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        try:
            return write(parent, number, make)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    versions._write = without_room  # type: ignore[assignment]


def _trace(
    version: int,
    die_at: int | None,
    count: str | None,
    log: Path,
) -> None:
    """Count the lines that `Publisher.publish` of `version` runs, on all threads.

    Kill the process at one of them if `die_at` is set.
    """
    from qarl.sync.publisher import Publisher

    publish = Publisher.publish
    lines = [0]
    within = [False]

    def on_line(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and within[0]:
            lines[0] += 1
            if lines[0] == die_at:
                note(
                    log,
                    f"PLANTED at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
                )
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return on_line if any(part in frame.f_code.co_filename for part in _PUBLISH) else None

    def traced(self: Publisher, number: int) -> Any:
        within[0] = number == version
        sys.settrace(on_call)
        try:
            return publish(self, number)
        finally:
            sys.settrace(None)
            if within[0] and count:
                Path(count).write_text(str(lines[0]))
            within[0] = False

    Publisher.publish = traced  # type: ignore[method-assign]
    # also traces the thread whose loop talks to servers, because it starts later
    threading.settrace(on_call)
