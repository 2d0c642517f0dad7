"""Atomic writing of files and folders: they appear complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` to write a file or a folder to.

    It is renamed to `target` when the block ends, and removed if the block raises. Remains of a
    process that died are removed first.
    """
    building = target.with_name(f"{target.name}.part")
    _remove(building)
    try:
        yield building
        os.replace(building, target)
    except BaseException:
        _remove(building)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
