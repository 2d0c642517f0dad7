"""Files and folders that appear complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A path beside `target`, to write a file or a folder at. It takes `target`'s name when the
    block ends, and is removed where the block raises; what a process that died left there is
    removed first.
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
