"""Tiny random models with pictures, with their processors, and pictures for them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from qarl.embedded.recipe import ensure_tiny
from tests.support.picture_families import FAMILIES, PATCH, TILE, PictureFamily
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
_IDEFICS: dict[str, tuple[Any, Any, Any]] = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
}
"""Model type → classes of its configuration, its model, and what makes its pixels."""
_QWEN: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
"""Model type → classes of its configuration and its model."""
PICTURE_FAMILIES = (*_IDEFICS, *_QWEN, *FAMILIES)
"""Model types that `write_picture_model` writes."""
_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_MOE = "_moe"
"""End of the model types of mixtures, which have the dense models' sizes, and experts."""
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
_QWEN_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"mrope_section": [8, 12, 12]},
    "qwen2_5_vl": {"mrope_section": [8, 12, 12]},
    "qwen3_vl": {"mrope_section": [12, 10, 10], "mrope_interleaved": True},
    "qwen3_5": {
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
"""Model type → how a head's pairs of columns are divided among three axes."""
_QWEN_TOWER: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 64,
        "out_hidden_size": 128,
        "intermediate_size": 128,
        "window_size": 2 * 2 * PATCH,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 64,
        "out_hidden_size": 128,
        "intermediate_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
    "qwen3_5": {
        "hidden_size": 64,
        "out_hidden_size": 128,
        "intermediate_size": 128,
        "num_position_embeddings": 64,
    },
}
"""Model type → what its tower has beside `_QWEN_SIZES`."""
_QWEN_SIZES = {"depth": 2, "num_heads": 2, "patch_size": PATCH}
_TEXT = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def write_picture_model(
    folder: Path,
    template: str = TEMPLATE,
    seed: int = 0,
    longest: int = 2 * TILE,
    family: str = "idefics3",
) -> None:
    """Write a random model with every parameter drawn, its tokenizer and its processor.

    Args:
        template: chat template with `<image>` in the place of a picture, for which Qwen's have
            three tokens.
        longest: longer side, in pixels, to which the processor scales a picture before it cuts it.
            Qwen's scale it to at most longest² pixels.
        family: model type, one of `PICTURE_FAMILIES`.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(ensure_tiny("tiny-qwen3"))
    text = {
        **_TEXT,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family in _IDEFICS:
        tokenizer.chat_template = template
        model = _write_idefics(folder, family, tokenizer, text, longest)
    elif family in FAMILIES:
        tokenizer.chat_template = template.replace("<image>", FAMILIES[family].picture)
        model = _write_published(folder, FAMILIES[family], tokenizer, text)
    else:
        tokenizer.chat_template = template.replace("<image>", _QWEN_PICTURE)
        model = _write_qwen(folder, family, tokenizer, text, longest)
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * noise)
        model.get_output_embeddings().weight.mul_(
            3
        )  # distributions with peaks, at which mismatch shows
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_stacks(folder)


def transpose_stacks(folder: Path) -> None:
    """Transpose experts' stacks in a folder, as Qwen3-VL's mixtures are published.

    transformers 5.19 reads them so, and does not write them so.
    """
    file = folder / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if tensor.ndim == 3 else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _write_idefics(
    folder: Path, family: str, tokenizer: Any, text: dict[str, Any], longest: int
) -> Any:
    """Write the processor of an Idefics3 or a SmolVLM, and return the model in fp32."""
    config_class, model_class, pixels_class = _IDEFICS[family]
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
                *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
            ]
        }
    )
    images = pixels_class(size={"longest_edge": longest}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=(TILE // PATCH) ** 2 // 4)
    processor.save_pretrained(folder)
    if family == "smolvlm":  # whose own processor cannot be made without videos
        for file in folder.glob("*_config.json"):
            file.write_text(file.read_text().replace("Idefics3Processor", "SmolVLMProcessor"))
    config = config_class(
        text_config={"model_type": "llama", **text},
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
    return model_class(config).float()


def _write_qwen(
    folder: Path, family: str, tokenizer: Any, text: dict[str, Any], longest: int
) -> Any:
    """Write the processor of a Qwen, with the files of those that are published, and return the
    model in fp32.
    """
    config_class, model_class = _QWEN[family]
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(names))
    tokenizer.save_pretrained(folder)
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": model_class.__name__.replace("ForConditionalGeneration", "Processor"),
        "min_pixels": (2 * PATCH) ** 2,
        "max_pixels": longest**2,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    kind = family.removesuffix(_MOE)
    rope = {"rope_type": "default", "rope_theta": 10000.0, **_QWEN_TEXT[kind]}
    text |= {"rope_parameters": rope}
    if kind != family:
        text |= _EXPERTS
    if family == "qwen3_5_moe":
        text |= {"shared_expert_intermediate_size": 128}
    if kind == "qwen3_5":
        text |= {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        }
    config = config_class(
        text_config=text,
        vision_config={**_QWEN_SIZES, **_QWEN_TOWER[kind]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    return model_class(config).float()


def _write_published(
    folder: Path, family: PictureFamily, tokenizer: Any, text: dict[str, Any]
) -> Any:
    """Write the processor of a model with the files of those that are published, and return the
    model in fp32.
    """
    names = list(dict.fromkeys((*family.tokens.values(), *family.named.values())))
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.save_pretrained(folder)
    if family.named:
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["extra_special_tokens"] = family.named
        file.write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(family.pixels))
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    numbers = {
        key: tokenizer.convert_tokens_to_ids(token)
        for key, token in family.tokens.items()
        if not key.startswith("_")
    }
    config = getattr(transformers, family.config)(
        text_config={**text, **family.text},
        vision_config=family.vision,
        **{"tie_word_embeddings": False, **numbers, **family.whole},
    )
    return getattr(transformers, family.model)(config).float()


def encoded(picture: Any, form: str = "PNG") -> bytes:
    """Return a picture as the contents of a file."""
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


def drawn(generator: np.random.Generator, width: int, height: int) -> bytes:
    """Return a PNG of random pixels."""
    pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels))
