"""Tiny random models with pictures, with their processors, and pictures for them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from qarl.embedded.recipe import ensure_tiny
from tests.support.tensors import seeded

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template that writes the model's token for each picture."""
TILE = 56
"""Width and height of what the tower encodes at once; larger pictures are cut into several."""
PATCH = 14
_CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
}
"""Model type → classes of its configuration, its model, and what makes its pixels."""


def write_picture_model(
    folder: Path,
    template: str = TEMPLATE,
    seed: int = 0,
    longest: int = 2 * TILE,
    family: str = "idefics3",
) -> None:
    """Write a random model with every parameter drawn, its tokenizer and its processor.

    Args:
        longest: longer side, in pixels, to which the processor scales a picture before it cuts it.
        family: model type, "idefics3" or "smolvlm".
    """
    config_class, model_class, pixels_class = _CLASSES[family]
    tokenizer: Any = AutoTokenizer.from_pretrained(ensure_tiny("tiny-qwen3"))
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
                *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
            ]
        }
    )
    tokenizer.chat_template = template
    images = pixels_class(size={"longest_edge": longest}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=(TILE // PATCH) ** 2 // 4)
    config = config_class(
        text_config={
            "model_type": "llama",
            "vocab_size": 640,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 2048,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        image_token_id=processor.image_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = model_class(config).float()
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * noise)
        model.lm_head.weight.mul_(3)  # distributions with peaks, at which mismatch shows
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if family == "smolvlm":  # whose own processor cannot be made without videos
        for file in folder.glob("*_config.json"):
            file.write_text(file.read_text().replace("Idefics3Processor", "SmolVLMProcessor"))


def encoded(picture: Any, form: str = "PNG") -> bytes:
    """Return a picture as the contents of a file."""
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


def drawn(generator: np.random.Generator, width: int, height: int) -> bytes:
    """Return a PNG of random pixels."""
    pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels))
