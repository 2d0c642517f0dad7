"""The run's side of a version's way: written whole, or as its difference from the version sent
before.
"""

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
    """Writes weight versions into a folder, and holds the last one in host memory, which the next
    is a delta from.

    folder: where servers read. full_every: of so many versions one is whole; with 1 all are, and
    none is held.
    """

    def __init__(self, folder: Path, full_every: int):
        self._folder = folder
        self._full_every = full_every
        self._deltas = 0
        self._held: VersionCache | None = None

    @property
    def keeps(self) -> bool:
        """Whether the next version may be a delta, from a version that servers then have to
        hold.
        """
        return self._full_every > 1

    def write(
        self,
        stream: Iterable[LowBitTensor],
        version: int,
        digests: Collection[str | None],
    ) -> Version:
        """Write a version as a delta where every server holds the one before, else whole; whole too
        where that is smaller, or due. digests: the digest of what each server holds, None for
        nothing. Raises `EngineError` where the disk refuses, `DeltaError` where the stream has
        other tensors than the one before; the next one is whole then.
        """
        if not self.keeps:
            return write_version(stream, self._folder, version)
        # neither one version nor the other until all of it is read
        base, self._held = self._held, None
        if base is None or self._deltas + 1 >= self._full_every or set(digests) != {base.digest}:
            self._held = VersionCache(version, stream, reuse=base)
            return self.write_whole()
        base_digest, delta = base.digest, base.make_delta(version, stream)
        self._held = base
        if len(delta) >= base.bytes:
            return self.write_whole()
        self._deltas += 1
        return write_delta(delta, self._folder, base, base_digest)

    def write_whole(self) -> Version:
        """The version written last, whole, for servers that cannot take the delta."""
        assert self._held is not None, "no version was written"
        self._deltas = 0
        return write_version(self._held.tensors(), self._folder, self._held.version)

    def sent(self, version: int) -> None:
        """All servers have that version: the files of others go."""
        remove_versions(self._folder, but=version)

    def remove(self) -> None:
        """No server reads any more: the files go, and the folder where nothing else is in it."""
        remove_versions(self._folder)
        with suppress(OSError):
            self._folder.rmdir()
