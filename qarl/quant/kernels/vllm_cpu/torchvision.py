"""Stand-in for the part of torchvision that vLLM's classes import and text does not use.

vLLM 0.32's Qwen3.5, Qwen3-VL, Qwen2.5-VL and Gemma 3 import transformers' image processors, which
import `torchvision.transforms.v2.functional`, also for models of text. The CPU environment has no
torchvision, because the public index has builds for CUDA alone, with which transformers cannot be
imported. Remove this when there is one that fits torch's build for CPUs.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "torchvision.transforms.v2"


class _Functional(ModuleType):
    """Module whose functions do not exist."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"{self.__name__}.{name} is needed for pictures, and torchvision is not installed"
        )


def stand_in_for_torchvision() -> None:
    """Make `from torchvision.transforms.v2 import functional` succeed without torchvision.

    Does nothing if torchvision is installed; idempotent. `import torchvision` fails as before, and
    transformers takes it for missing.
    """
    if _NAME in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    package: Any = ModuleType(_NAME)
    package.functional = _Functional(f"{_NAME}.functional")
    sys.modules[_NAME] = package
