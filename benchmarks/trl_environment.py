"""Python environment of TRL, which `make trl-env` creates."""

import os
from pathlib import Path

from qarl.configs.errors import ConfigError

TRL_PYTHON = Path(".venv-trl/bin/python")
"""Interpreter that `make trl-env` installs."""


def require_trl(python: Path) -> None:
    """Raise `ConfigError` if TRL's interpreter does not exist."""
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"no interpreter {str(python)!r} for TRL; make its environment with `make trl-env`, or"
            " name another one with --trl-python"
        )
