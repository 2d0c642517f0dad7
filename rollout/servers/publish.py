"""A weight version to all replicas, or to none, through vLLM's weight-transfer phases.

    send       where learner and servers share no file system: every replica gets the files
    stage      every replica reads the files, hashes what they make, compares the names with its model's layers, and
               makes the layers that changed beside the model; it samples meanwhile
    commit     every replica pauses, takes what it staged, and goes on

What a version can be refused for is known when all have staged it, and until then no replica has changed. A replica
whose commit fails stays paused: it answers nothing until a publish succeeds. What broke off on the way is tried again
(`rollout.servers.replicas`), each phase by itself.
"""

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlencode

from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.servers.client import AnswerError, LostServerError, Server
from qarl.rollout.servers.receive import VERSIONS
from qarl.rollout.servers.replicas import Replicas
from qarl.rollout.servers.versions import MANIFEST, Version

_BYTES_A_SECOND = 50e6
"""That a server gets, reads, hashes and loads at the least; with `_SECONDS` more it is taken to hang."""
_SECONDS = 30.0
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.25
"""Seconds between questions whether a replica has staged."""


@dataclass(frozen=True)
class PublishTimings:
    """What a publish took. bytes: of the files. whole: not as a delta. write, send, stage, pause: seconds; the first is
    the run's own, in the others all servers are at it together; in `pause` the slowest samples nothing."""

    bytes: int
    whole: bool
    write: float
    send: float
    stage: float
    pause: float


async def publish_files(
    replicas: Replicas, version: Version, label: str, keep: bool, in_flight: bool, run: str | None, write: float
) -> tuple[LoadReport, PublishTimings]:
    """Have all servers take a version; `label` is what they say sampled a token from then on. keep: whether they are to
    hold it, for the next to be a delta from. in_flight: whether requests under way go on by it. run: as which the files
    are sent; None where servers see them. write: seconds it took to write them. Returns what the servers loaded, or,
    where one staged other bytes than were written or other names than it has layers, what that one read, and then no
    server has changed. A server that is lost on the way is left out. Raises `EngineError` naming those that failed."""
    clock, count = asyncio.get_running_loop().time, len(replicas.present())
    times, folders = [clock()], {}
    if run is not None:
        folders = await replicas.on_all(lambda server: _sent(server, version, run, count))
    times.append(clock())
    own = str(version.folder.absolute())
    staged = await replicas.on_all(lambda server: _staged(server, version, folders.get(server, own), keep))
    times.append(clock())
    report = next((report for report in staged.values() if not _fits(report, version)), None)
    if report is not None:
        await replicas.on_all(lambda server: server.call("qarl_abandon"))
    else:
        loaded = await replicas.on_all(lambda server: _committed(server, version, label, in_flight))
        report = next(iter(loaded.values()))
        times.append(clock())
    send, stage, *pause = (late - early for early, late in pairwise(times))
    whole = version.base is None
    return report, PublishTimings(version.bytes, whole=whole, write=write, send=send, stage=stage, pause=sum(pause))


async def held_digests(replicas: Replicas) -> list[str | None]:
    """Of the version that each worker of each server holds, and samples by; None where it holds none."""
    states = await replicas.on_all(lambda server: server.call("qarl_state"))
    return [state["held"] for workers in states.values() for state in workers]


async def _sent(server: Server, version: Version, run: str, sharing: int) -> str:
    """The folder in which the server has a version's files now. sharing: servers that are sent them at once."""
    answer: Any = None
    for name in (MANIFEST, *version.names):
        file = version.folder / name
        path = f"{VERSIONS}/{version.version}/{name}?{urlencode({'run': run})}"
        answer = await server.upload(path, file, seconds_of(sharing * file.stat().st_size))
    if not answer["folder"]:
        raise AnswerError(
            f"the server at {server.url} lacks files of weight version {version.version} that it was sent"
        )
    return answer["folder"]


async def _staged(server: Server, version: Version, folder: str, keep: bool) -> LoadReport:
    await server.call("qarl_abandon", seconds_of(version.tensor_bytes))  # what a publish that broke off has left
    await server.post("/start_weight_update")
    announced = {
        "folder": folder, "digest": version.digest, "tensor_bytes": version.tensor_bytes, "keep": keep,
    }  # fmt: skip
    await server.post("/update_weights", {"update_info": announced})
    clock, wait = asyncio.get_running_loop().time, _FIRST_WAIT
    deadline = clock() + min(seconds_of(version.tensor_bytes), server.seconds)
    while None in (reports := await server.call("qarl_stage")):
        if clock() > deadline:
            raise LostServerError(
                f"the server at {server.url} has not staged weight version {version.version} in time; look at its log"
            )
        await asyncio.sleep(wait)
        wait = min(1.5 * wait, _LONGEST_WAIT)
    return _one(reports, server, "staged")


async def _committed(server: Server, version: Version, label: str, in_flight: bool) -> LoadReport:
    # Its prefix cache is emptied. Requests end first; or they lose their keys and values too, as those that vLLM
    # preempts, and so their next tokens have none of the weights before.
    await server.post(f"/pause?mode={'keep' if in_flight else 'wait'}")
    states = await server.call("qarl_state")
    if all(state["staged"] for state in states):
        await server.post("/finish_weight_update", {"weight_version": label}, seconds_of(version.tensor_bytes))
    elif all(state["loaded"] and state["loaded"]["digest"] == version.digest for state in states):
        await server.post("/update_weight_version", {"new_version": label})  # at the first try, its answer was lost
    else:
        raise LostServerError(f"the server at {server.url} no longer holds what it staged: it was restarted")
    report = _one([state["loaded"] for state in await server.call("qarl_state")], server, "loaded")
    if report.digest != version.digest:
        raise EngineError(f"the server at {server.url} loaded {report.digest}, and {version.digest} was published")
    await server.post("/resume")
    return report


def seconds_of(tensor_bytes: int) -> float:
    """That a server may take to get, to read, or to load, a version of so many bytes."""
    return _SECONDS + tensor_bytes / _BYTES_A_SECOND


def _one(reports: list[Any], server: Server, kind: str) -> LoadReport:
    """What all of a server's workers report, which has to be the same."""
    if any(report != reports[0] for report in reports):
        raise EngineError(f"the workers of the server at {server.url} {kind} different versions: {reports}")
    fields = reports[0]
    if fields is None:
        raise LostServerError(f"the server at {server.url} no longer holds what it {kind}: it was restarted")
    return LoadReport(
        digest=fields["digest"],
        consumed=fields["consumed"],
        unconsumed=tuple(fields["unconsumed"]),
        missing=tuple(fields["missing"]),
    )


def _fits(report: LoadReport, version: Version) -> bool:
    return report.digest == version.digest and not report.unconsumed and not report.missing
