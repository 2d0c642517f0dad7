"""Model folders in the cache, built on first use by one process, and complete or absent."""

import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from qarl.configs.errors import ModelError
from qarl.configs.files import written_aside
from qarl.quant.runtime.answers import cache_folder


def to_stderr(message: str) -> None:
    """Report progress in one line."""
    sys.stderr.write(message + "\n")


def cached_path(
    name: str,
    facts: Mapping[str, Any],
    cache: Path | None = None,
) -> Path:
    """Return `<cache>/<name>-<hash of facts>`, whether it exists or not.

    Args:
        name: Name of the model.
        facts: Everything that decides the folder's content, as JSON types.
        cache: Folder of the cache. Default: $QARL_CACHE, else ~/.cache/qarl.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return (cache or cache_folder()) / f"{name}-{digest[:12]}"


def ensure_cached(name: str, folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, which `build` creates if it does not exist.

    If several processes ask at the same time, one builds and the others wait. A folder appears
    complete or not at all.

    Args:
        name: Name of the model, for messages.
        folder: The folder to return.
        build: Creates the folder at the path that it is given, which is a temporary one.

    Raises:
        ModelError: The cache cannot be written. Errors of `build` are passed on.
    """
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            # The system releases the lock if the process dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                to_stderr(f"building {name} in {folder}")
                with written_aside(folder) as building:
                    build(building)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"cannot keep {name} in the cache {str(folder.parent)!r}: {reason}; name another folder"
            " in QARL_CACHE"
        ) from error
    return folder
