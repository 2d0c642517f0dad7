"""The environment of TRL, which `make trl-env` makes."""

import os
from pathlib import Path

from qarl.configs.errors import ConfigError

TRL_PYTHON = Path(".venv-trl/bin/python")
"""Where `make trl-env` puts it."""


def require_trl(python: Path) -> None:
    """Raise `ConfigError` where there is no interpreter for TRL."""
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"no interpreter {str(python)!r} for TRL; make its environment with `make trl-env`, or"
            " name another one with --trl-python"
        )
