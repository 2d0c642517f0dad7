"""Publish a weight version to all replicas, or to none, in three phases.

    send     Every replica gets the files, if learner and servers share no file system.
    stage    Every replica reads the files, hashes the tensors, and compares their names
             with its model's layers. It keeps sampling meanwhile.
    commit   Every replica pauses, loads what it staged, and resumes.

Every reason to refuse a version is known once all replicas have staged it, and until then no
replica has changed. A replica whose commit fails stays paused: it answers nothing until a publish
succeeds. Each phase retries answers that broke off (`rollout.servers.replicas`).
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
    """Load a version on all servers and return their load report.

    If a server staged other bytes than were written, or other names than it has layers, returns
    that server's report; no server has changed then. A server that is lost during the publish is
    left out.

    Args:
        version: Version and its files.
        label: Name of the weights that servers report for each token they sample from then on.
        keep: Whether servers hold the version, so that the next one may be a delta from it.
        in_flight: Whether pending requests continue with the new weights.
        run: Run name under which the files are sent; None if servers see the files themselves.

    Raises:
        EngineError: Some servers failed; the message names them.
    """
    written = str(version.folder.absolute())
    count = len(replicas.present())
    received = {}
    if run is not None:
        received = await replicas.on_all(lambda replica: replica.send(version, run, count))
    staged = await replicas.on_all(
        lambda replica: replica.stage(version, received.get(replica, written), keep)
    )
    for report in staged.values():
        if not report.took_all_of(version.digest):
            await replicas.on_all(lambda replica: replica.abandon())
            return report
    loaded = await replicas.on_all(lambda replica: replica.commit(version, label, in_flight))
    return next(iter(loaded.values()))
