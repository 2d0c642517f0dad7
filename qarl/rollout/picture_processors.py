"""Processors of model folders, which make tokens and pixels of prompts with pictures."""

from pathlib import Path
from typing import Any

from transformers import AutoProcessor, Idefics3Processor


class SmolVlmProcessor(Idefics3Processor):
    """SmolVLM's processor for text and pictures, which are made into a prompt as Idefics3's are.

    transformers' own class cannot be made without torchvision and num2words, which it uses for
    videos alone.
    """

    @property
    def global_image_token(self) -> str:
        """The token before a picture as a whole, by the name that vLLM asks for."""
        return self.global_image_tag


_OWN = {"smolvlm": SmolVlmProcessor}
"""Model type → class of ours that stands in for transformers' class."""


def load_processor(folder: Path, model_type: str) -> Any:
    """Load the processor of a model's folder. Raises whatever its files make transformers raise."""
    return _OWN.get(model_type, AutoProcessor).from_pretrained(folder)
