"""A weight version to all replicas, or to none, in three phases.

    send       where learner and servers share no file system: every replica gets the files stage
    every replica reads the files, hashes what they make, and compares the names with its model's
    layers;
               it samples meanwhile
    commit     every replica pauses, takes what it staged, and goes on

What a version can be refused for is known when all have staged it, and until then no replica has
changed. A replica whose commit fails stays paused: it answers nothing until a publish succeeds.
What broke off on the way is tried again (`rollout.servers.replicas`), each phase by itself.
"""

from qarl.rollout.engine import LoadReport
from qarl.rollout.servers.replicas import Replicas
from qarl.rollout.servers.versions import Version


async def publish_files(
    replicas: Replicas,
    version: Version,
    label: str,
    keep: bool,
    in_flight: bool,
    run: str | None,
) -> LoadReport:
    """Have all servers take a version; `label` is what they say sampled a token from then on. keep:
    whether they are to hold it, for the next to be a delta from. in_flight: whether requests under
    way go on by it. run: as which the files are sent; None where servers see them. Returns what the
    servers loaded, or, where one staged other bytes than were written or other names than it has
    layers, what that one read, and then no server has changed. A server that is lost on the way is
    left out. Raises `EngineError` naming those that failed.
    """
    own, count, folders = str(version.folder.absolute()), len(replicas.present()), {}
    if run is not None:
        folders = await replicas.on_all(lambda replica: replica.send(version, run, count))
    staged = await replicas.on_all(
        lambda replica: replica.stage(version, folders.get(replica, own), keep)
    )
    unfit = next(
        (report for report in staged.values() if not report.took_all_of(version.digest)),
        None,
    )
    if unfit is not None:
        await replicas.on_all(lambda replica: replica.abandon())
        return unfit
    loaded = await replicas.on_all(lambda replica: replica.commit(version, label, in_flight))
    return next(iter(loaded.values()))
