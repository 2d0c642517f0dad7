"""A weight version to all replicas, or to none, through vLLM's weight-transfer phases.

    stage      every replica reads the files, hashes them and compares their names with its model's layers
    commit     every replica pauses, loads what it staged, and goes on

What a version can be refused for is known when all have staged it, and until then no replica has changed. A replica
whose commit fails stays paused: it answers nothing until a publish succeeds. What broke off on the way is tried again
(`rollout.servers.replicas`), each phase by itself.
"""

from rollout.engine import EngineError, LoadReport
from rollout.servers.client import LostServerError, Server
from rollout.servers.replicas import Replicas
from rollout.servers.versions import Version

_BYTES_A_SECOND = 50e6
"""That a server reads, hashes and loads at the least; with `_SECONDS` more it is taken to hang."""
_SECONDS = 30.0


async def publish_files(replicas: Replicas, version: Version, label: str) -> LoadReport:
    """Have all servers take a version; `label` is what they say sampled a token from then on. Returns what they loaded,
    or, where one staged other bytes than were written or other names than it has layers, what that one read, and then
    no server has changed. A server that is lost on the way is left out. Raises `EngineError` naming those that
    failed."""
    staged = await replicas.on_all(lambda server: _staged(server, version))
    unfit = next((report for report in staged.values() if not _fits(report, version)), None)
    if unfit is not None:
        await replicas.on_all(lambda server: server.call("qarl_abandon"))
        return unfit
    loaded = await replicas.on_all(lambda server: _committed(server, version, label))
    return next(iter(loaded.values()))


async def _staged(server: Server, version: Version) -> LoadReport:
    await server.call("qarl_abandon")  # what a publish that broke off has left
    await server.post("/start_weight_update")
    update = {"update_info": {"folder": str(version.folder.absolute())}}
    await server.post("/update_weights", update, _seconds(version))
    return await _report(server, "staged")


async def _committed(server: Server, version: Version, label: str) -> LoadReport:
    await server.post("/pause?mode=wait")  # its requests end, and its prefix cache is emptied
    states = await server.call("qarl_state")
    if all(state["staged"] for state in states):
        await server.post("/finish_weight_update", {"weight_version": label}, _seconds(version))
    elif all(state["loaded"] and state["loaded"]["digest"] == version.digest for state in states):
        await server.post("/update_weight_version", {"new_version": label})  # at the first try, its answer was lost
    else:
        raise LostServerError(f"the server at {server.url} no longer holds what it staged: it was restarted")
    report = await _report(server, "loaded")
    if report.digest != version.digest:
        raise EngineError(f"the server at {server.url} loaded {report.digest}, and {version.digest} was published")
    await server.post("/resume")
    return report


def _seconds(version: Version) -> float:
    return _SECONDS + version.bytes / _BYTES_A_SECOND


async def _report(server: Server, kind: str) -> LoadReport:
    """What all of a server's workers report, which has to be the same."""
    reports = [state[kind] for state in await server.call("qarl_state")]
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
