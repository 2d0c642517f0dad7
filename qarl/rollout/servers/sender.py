"""The run's side of publishing: writes each version in full, or as a delta from the one before."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from qarl.quant.delta import VersionCache
from qarl.quant.types import LowBitTensor
from qarl.rollout.servers.versions import (
    Version,
    remove_versions,
    write_delta,
    write_version,
)


class VersionSender:
    """Writes weight versions into a folder and caches the latest one for the next delta.

    Args:
        folder: Folder that servers read from.
        full_every: One version in `full_every` is written in full. With 1 all are, and none is
            cached in host memory.
    """

    def __init__(self, folder: Path, full_every: int):
        self._folder = folder
        self._full_every = full_every
        self._deltas = 0
        self._cached: VersionCache | None = None

    @property
    def keeps(self) -> bool:
        """True if servers have to hold each version because the next one may be a delta from it."""
        return self._full_every > 1

    def write(
        self,
        stream: Iterable[LowBitTensor],
        version: int,
        digests: Collection[str | None],
    ) -> Version:
        """Write a version as a delta if every server holds the version before, otherwise in full.

        It is also written in full if that is smaller, or if a full version is due.

        Args:
            stream: The version's tensors.
            version: Number of the version.
            digests: Digest of the version that each server holds, None if it holds none.

        Raises:
            EngineError: The disk refuses.
            DeltaError: The stream has other tensors than the version before. The next version is
                then written in full.
        """
        if not self.keeps:
            return write_version(stream, self._folder, version)
        base = self._cached
        # Until the whole stream is read, the cache is a mix of two versions.
        self._cached = None
        is_due = self._deltas + 1 >= self._full_every
        if base is None or is_due or set(digests) != {base.digest}:
            self._cached = VersionCache(version, stream, reuse=base)
            return self.write_whole()
        base_digest = base.digest
        delta = base.make_delta(version, stream)  # turns `base` into the new version
        self._cached = base
        if len(delta) >= base.bytes:
            return self.write_whole()
        self._deltas += 1
        return write_delta(delta, self._folder, base, base_digest)

    def write_whole(self) -> Version:
        """Write the latest version again, in full, for servers that cannot apply the delta."""
        assert self._cached is not None, "no version was written"
        self._deltas = 0
        return write_version(self._cached.tensors(), self._folder, self._cached.version)

    def sent(self, version: int) -> None:
        """Remove the files of other versions, because all servers have this one."""
        remove_versions(self._folder, but=version)

    def remove(self) -> None:
        """Remove all files, and the folder if it is then empty. No server reads them any more."""
        remove_versions(self._folder)
        with suppress(OSError):
            self._folder.rmdir()
