"""Stand-in for the part of torchvision that vLLM's classes import and text does not use.

Many of vLLM 0.32's classes of models with pictures (Qwen3.5, Gemma 3 and 4, InternVL) import image
processors, its own and transformers', which import `torchvision.transforms`, also if all prompts
are text. The CPU environment has no torchvision, because the public index has builds for CUDA
alone, with which transformers cannot be imported. Remove this when there is one that fits torch's
build for CPUs.
"""

import enum
import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers.utils.import_utils import is_torchvision_available

_TRANSFORMS = "torchvision.transforms"
_V2 = f"{_TRANSFORMS}.v2"
_NAMES = (
    "torchvision",
    _TRANSFORMS,
    f"{_TRANSFORMS}.functional",
    _V2,
    f"{_V2}.functional",
)


class InterpolationMode(enum.Enum):
    """torchvision's names of interpolations, which image processors have as default arguments."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Functions(ModuleType):
    """Module whose functions do not exist."""

    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"{self.__name__}.{name} is needed for pictures, and torchvision is not installed"
        )


def stand_in_for_torchvision() -> None:
    """Make imports of `torchvision.transforms` succeed in vLLM's classes without torchvision.

    Does nothing if torchvision is installed; idempotent. Elsewhere `import torchvision` fails as
    before, and transformers takes it for missing.
    """
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    load = _LazyRegisteredModel.load_model_cls
    if getattr(load, "has_torchvision", False):
        return

    @functools.wraps(load)
    def load_beside_torchvision(self: Any) -> Any:
        with beside_torchvision():
            return load(self)

    load_beside_torchvision.has_torchvision = True  # type: ignore[attr-defined]
    _LazyRegisteredModel.load_model_cls = load_beside_torchvision  # type: ignore[method-assign]


@contextmanager
def beside_torchvision() -> Iterator[None]:
    """Provide modules of torchvision's names within this context, if it is not installed."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision"):
        yield
        return
    is_torchvision_available()  # remembers the answer
    modules: dict[str, Any] = {}
    for name in _NAMES:
        modules[name] = module = _Functions(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        parent, _, own_name = name.rpartition(".")
        if parent:
            setattr(modules[parent], own_name, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in _NAMES:
            sys.modules.pop(name, None)
