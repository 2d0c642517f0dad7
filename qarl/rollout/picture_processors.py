"""Processors of model folders, which make tokens and pixels of prompts with pictures.

transformers makes the processors of some models only beside libraries that it needs for videos
alone (torchvision, num2words). The classes here make prompts of text and pictures without them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, Idefics3Processor, Qwen2VLProcessor
from transformers.processing_utils import VideosKwargs


class SmolVlmProcessor(Idefics3Processor):
    """SmolVLM's processor for text and pictures, which are made into a prompt as Idefics3's are."""

    @property
    def global_image_token(self) -> str:
        """The token before a picture as a whole, by the name that vLLM asks for."""
        return self.global_image_tag


class _NoVideos:
    """Stands in for a processor of videos, which vLLM asks for its options and sizes."""

    valid_kwargs = VideosKwargs
    temporal_patch_size = 2
    size: Mapping[str, int] = {"shortest_edge": 1 << 16, "longest_edge": 1 << 20}
    """Bounds on the pixels of all frames. No video is ever that large, because none is allowed."""


class QwenVlProcessor(Qwen2VLProcessor):
    """The processor for text and pictures of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5
    and the last two's mixtures.

    They differ in videos. Where a folder's files name another patch size or other bounds on
    pixels, these come with the part for pictures.
    """

    video_processor = _NoVideos()

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        **more: Any,
    ):
        # transformers loads the parts that this signature names
        super().__init__(image_processor, tokenizer, None, chat_template, **more)


OWN_PROCESSORS: Mapping[str, type[Any]] = {
    "qwen2_5_vl": QwenVlProcessor,
    "qwen2_vl": QwenVlProcessor,
    "qwen3_5": QwenVlProcessor,
    "qwen3_5_moe": QwenVlProcessor,
    "qwen3_vl": QwenVlProcessor,
    "qwen3_vl_moe": QwenVlProcessor,
    "smolvlm": SmolVlmProcessor,
}
"""Model type → class of ours that stands in for transformers' class."""


def load_processor(folder: Path, model_type: str) -> Any:
    """Load the processor of a model's folder. Raises whatever its files make transformers raise."""
    return OWN_PROCESSORS.get(model_type, AutoProcessor).from_pretrained(folder)
