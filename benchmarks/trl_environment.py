"""Python environment of TRL, which another process measures."""

import subprocess
from pathlib import Path

from qarl.configs.errors import ConfigError


def require_trl(python: Path) -> None:
    """Raise `ConfigError` if this interpreter does not exist, or cannot import TRL."""
    code = "import importlib.util as u; raise SystemExit(u.find_spec('trl') is None)"
    try:
        done = subprocess.run([str(python), "-P", "-c", code], check=False)
    except OSError as error:
        raise ConfigError(
            f"no interpreter {str(python)!r} for TRL: {error}; name one with --trl-python"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"{str(python)!r} has no TRL; install it (pip install 'qarl-train[trl]'), or name"
            " another interpreter with --trl-python"
        )
