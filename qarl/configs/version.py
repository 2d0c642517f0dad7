"""QaRL's version, for every room and for the wheel (`pyproject.toml`)."""

VERSION = "0.1.0"
