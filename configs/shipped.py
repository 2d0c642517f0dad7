"""The configurations shipped with QaRL, and which one a command starts from."""

from importlib.resources import files
from pathlib import Path

from configs.schema.run import ConfigError

_EMBEDDED = "tiny-"


def shipped_names() -> list[str]:
    """Names of the shipped YAML files."""
    return sorted(p.name.removesuffix(".yaml") for p in files("configs").iterdir() if p.name.endswith(".yaml"))


def config_file(name: str) -> Path:
    """A YAML file by path, or a shipped one by name. Raises `ConfigError` where there is neither."""
    if Path(name).is_file():
        return Path(name)
    if name in shipped_names():
        return Path(str(files("configs") / f"{name}.yaml"))
    raise ConfigError(f"no configuration file {name!r}, and no shipped one of that name ({', '.join(shipped_names())})")


def default_config(model: str | None) -> Path:
    """Where a run without --config starts: the embedded policy's own file, else the paper's settings."""
    if model is None:
        return config_file("tiny-qwen3")
    return config_file(model if model.startswith(_EMBEDDED) and model in shipped_names() else "paper")
