"""Processors of model folders, which make tokens and pixels of prompts with pictures.

transformers 5.19 makes many processors only beside libraries that they need for videos alone
(torchvision, num2words). Here they are loaded with a stand-in for their part for videos. Remove it
when transformers loads a processor without that part.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoConfig, AutoProcessor, Idefics3Processor, ProcessorMixin
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import PILImageResampling
from transformers.models.auto import (
    image_processing_auto,
    processing_auto,
    video_processing_auto,
)
from transformers.models.auto.auto_mappings import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.processing_utils import VideosKwargs
from transformers.utils.hub import PushToHubMixin
from transformers.utils.import_utils import DummyObject

from qarl.quant.kernels.vllm_cpu.torchvision import beside_torchvision
from qarl.quant.runtime.replaced import replaced


class SmolVlmProcessor(Idefics3Processor):
    """SmolVLM's processor for text and pictures, which are made into a prompt as Idefics3's are."""

    @property
    def global_image_token(self) -> str:
        """The token before a picture as a whole, by the name that vLLM asks for."""
        return self.global_image_tag


class NoVideos(PushToHubMixin):
    """Stands in for a processor of videos, which others ask for its options and sizes."""

    valid_kwargs = VideosKwargs
    temporal_patch_size = 2
    size: Mapping[str, int] = {"shortest_edge": 1 << 16, "longest_edge": 1 << 20}
    """Bounds on the pixels of all frames. No video is ever that large, because none is allowed."""

    @classmethod
    def from_pretrained(cls, *unused: Any, **also: Any) -> "NoVideos":
        """Return the stand-in for any folder (transformers' hook)."""
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of a part for videos, which are none (transformers' hook)."""
        return {}


class _TorchFunctions(TorchvisionBackend):
    """transformers' backend by torchvision with the functions of torch that torchvision calls."""

    def process_image(self, image: Any, *unused: Any, **also: Any) -> torch.Tensor:
        """Return the pixels of a picture in RGB, uint8 [3, height, width]."""
        pixels = np.array(image.convert("RGB") if isinstance(image, Image.Image) else image)
        return torch.from_numpy(pixels).movedim(-1, 0).contiguous()

    def resize(
        self, image: torch.Tensor, size: Any, resample: Any = None, antialias: bool = True, **_: Any
    ) -> torch.Tensor:
        """Return pictures [..., height, width] in another size. Raises `ValueError` if the size is
        not a height and a width.
        """
        if not (size.height and size.width):
            raise ValueError(f"a size of {dict(size)}, and needed are 'height' and 'width'")
        mode = PILImageResampling(resample or PILImageResampling.BILINEAR).name.lower()
        return F.interpolate(
            image, (size.height, size.width), mode=mode, align_corners=False, antialias=antialias
        )

    def normalize(
        self, image: torch.Tensor, mean: Any, std: Any, inplace: bool = False, **unused: Any
    ) -> torch.Tensor:
        """Return pictures [..., 3, height, width] less their channels' mean, divided by std."""
        mean, std = (torch.as_tensor(t, dtype=image.dtype)[:, None, None] for t in (mean, std))
        return (image - mean) / std


def own_class(kind: Any) -> Any:
    """Return the class that makes a processor where transformers' class of it cannot.

    SmolVLM's has a class here. Pixtral's asks for torchvision, without using it for pictures, and
    is then found in its own module.
    """
    if getattr(kind, "__name__", "") == "SmolVLMProcessor":
        return SmolVlmProcessor
    return _in_its_module(kind, PROCESSOR_MAPPING_NAMES, "processing")


def _own_pixels(kind: Any) -> Any:
    """Return the class that makes pixels where transformers' class of it needs torchvision."""
    names: Any = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"]
    real = _in_its_module(kind, names, "image_processing")
    if real is kind:
        return kind
    return type(real.__name__, (real, _TorchFunctions), {"__module__": real.__module__})


def _in_its_module(kind: Any, names: Mapping[str, Any], part: str) -> Any:
    """Return transformers' class of which `kind` is a dummy, or `kind` if it is none.

    Args:
        kind: a class of transformers, or the dummy that stands for it where libraries are missing.
        names: model type → names of its classes.
        part: beginning of their modules' names.
    """
    if not isinstance(kind, DummyObject):
        return kind
    for model_type, classes in names.items():
        if kind.__name__ in (classes if isinstance(classes, str) else classes.values()):
            model = model_type_to_module_name(model_type)
            with beside_torchvision():
                module = importlib.import_module(f"transformers.models.{model}.{part}_{model}")
            return getattr(module, kind.__name__, kind)
    return kind


@contextmanager
def without_videos() -> Iterator[None]:
    """Make transformers load processors without their part for videos, within this context."""
    check = ProcessorMixin.check_argument_for_proper_class
    class_of_name = processing_auto.processor_class_from_name

    def check_others(self: Any, name: str, argument: Any) -> Any:
        return NoVideos if isinstance(argument, NoVideos) else check(self, name, argument)

    pixels_of_name = image_processing_auto.get_image_processor_class_from_name

    def own_class_of_name(name: str) -> Any:
        return own_class(class_of_name(name))

    def own_pixels_of_name(name: str) -> Any:
        return _own_pixels(pixels_of_name(name))

    with (
        replaced(ProcessorMixin, check_argument_for_proper_class=check_others),
        replaced(processing_auto, processor_class_from_name=own_class_of_name),
        replaced(image_processing_auto, get_image_processor_class_from_name=own_pixels_of_name),
        replaced(video_processing_auto, AutoVideoProcessor=NoVideos),
    ):
        yield


def load_processor(folder: Path) -> Any:
    """Load the processor of a model's folder.

    Raises whatever its files make transformers raise, and `ValueError` if that is none of pictures.
    """
    # if the files name a class that does not exist, the configuration's type chooses it
    config = AutoConfig.from_pretrained(folder)
    with without_videos():
        processor = AutoProcessor.from_pretrained(folder, config=config)
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"transformers makes a {type(processor).__name__} of its files")
    return processor
