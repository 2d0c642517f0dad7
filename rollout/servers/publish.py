"""A weight version to all replicas, or to none, through vLLM's weight-transfer phases.

    stage      every replica reads the files, hashes them and compares their names with its model's layers
    commit     every replica pauses, loads what it staged, and goes on

What a version can be refused for is known when all have staged it, and until then no replica has changed. A replica
whose commit fails stays paused: it answers nothing until a publish succeeds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout.engine import EngineError, LoadReport
from rollout.servers.client import Server
from rollout.servers.versions import Version

_TRIES = 2


async def publish_files(servers: Sequence[Server], version: Version, label: str) -> LoadReport:
    """Have all servers take a version; `label` is what they say sampled a token from then on. Returns what they loaded,
    or, where one staged other bytes than were written or other names than it has layers, what that one read, and then
    no server has changed. Raises `EngineError` naming the servers that failed."""
    staged = await _on_all(servers, lambda server: _staged(server, version))
    unfit = next((report for report in staged if not _fits(report, version)), None)
    if unfit is not None:
        await _on_all(servers, lambda server: server.call("qarl_abandon"))
        return unfit
    loaded = await _on_all(servers, lambda server: _committed(server, version, label))
    return loaded[0]


async def _staged(server: Server, version: Version) -> LoadReport:
    await server.call("qarl_abandon")  # what a publish that broke off has left
    await server.post("/start_weight_update")
    await server.post("/update_weights", {"update_info": {"folder": str(version.folder.absolute())}})
    return await _report(server, "staged")


async def _committed(server: Server, version: Version, label: str) -> LoadReport:
    await server.post("/pause?mode=wait")  # its requests end, and its prefix cache is emptied
    if any(state["staged"] for state in await server.call("qarl_state")):
        await server.post("/finish_weight_update", {"weight_version": label})
    else:  # loaded at the first try, and the answer was lost
        await server.post("/update_weight_version", {"new_version": label})
    report = await _report(server, "loaded")
    if report.digest != version.digest:
        raise EngineError(f"the server at {server.url} loaded {report.digest}, and {version.digest} was published")
    await server.post("/resume")
    return report


async def _report(server: Server, kind: str) -> LoadReport:
    """What all of a server's workers report, which has to be the same."""
    reports = [state[kind] for state in await server.call("qarl_state")]
    if any(report != reports[0] for report in reports):
        raise EngineError(f"the workers of the server at {server.url} {kind} different versions: {reports}")
    fields = reports[0]
    return LoadReport(
        digest=fields["digest"],
        consumed=fields["consumed"],
        unconsumed=tuple(fields["unconsumed"]),
        missing=tuple(fields["missing"]),
    )


def _fits(report: LoadReport, version: Version) -> bool:
    return report.digest == version.digest and not report.unconsumed and not report.missing


async def _on_all(servers: Sequence[Server], step: Callable[[Server], Awaitable[Any]]) -> list[Any]:
    """The step on all servers at once, tried again on those where it failed."""
    results: dict[str, Any] = {}
    failed: list[BaseException] = []
    for _ in range(_TRIES):
        waiting = [server for server in servers if server.url not in results]
        outcomes = await asyncio.gather(*(step(server) for server in waiting), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        results |= {
            server.url: outcome
            for server, outcome in zip(waiting, outcomes, strict=True)
            if not isinstance(outcome, BaseException)
        }
        if not failed:
            return [results[server.url] for server in servers]
    raise EngineError("; ".join(str(error) for error in failed)) from failed[0]
