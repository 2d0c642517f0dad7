"""What the tiny models of families with pictures consist of, as their publishers write them."""

from dataclasses import dataclass, field
from typing import Any

TILE = 56
"""Width and height of what a tower encodes at once; larger pictures are cut into several."""
PATCH = 14
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": PATCH,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 6, 6],
}
_FULL_MROPE = {**_MROPE, "partial_rotary_factor": 1.0, "mrope_section": [8, 12, 12]}
_GLM_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "image_size": TILE,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
}
_GRID = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
_SIGLIP = {**_SIZES, "model_type": "siglip_vision_model", "vision_use_head": False}
_SIGLIP2 = {"num_patches": 16, "vision_use_head": False}
_CLIP = {**_SIZES, "model_type": "clip_vision_model", "projection_dim": 64}
_GLM_TOKENS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}
_GLM_PIXELS = {
    "image_processor_type": "Glm4vImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 2 * (2 * TILE) ** 2},
}
_GLM_PICTURE = "<|begin_of_image|><|image|><|end_of_image|>"


@dataclass(frozen=True, kw_only=True)
class PictureFamily:
    """Parts of a tiny model and of its processor."""

    config: str
    """transformers' class of the configuration."""
    model: str
    """transformers' class of the model."""
    picture: str = "<image>"
    """Text that a chat template writes in the place of a picture."""
    tokens: dict[str, str]
    """Field of config.json, or a name that begins with "_" → special token whose number it has."""
    named: dict[str, str] = field(default_factory=dict)
    """Attribute of the tokenizer → special token."""
    text: dict[str, Any] = field(default_factory=dict)
    """Settings of the language model."""
    vision: dict[str, Any]
    """Settings of the tower."""
    whole: dict[str, Any] = field(default_factory=dict)
    """Other settings of the model."""
    pixels: dict[str, Any]
    """preprocessor_config.json."""
    processor: dict[str, Any]
    """processor_config.json."""


FAMILIES: dict[str, PictureFamily] = {
    "internvl": PictureFamily(
        config="InternVLConfig",
        model="InternVLForConditionalGeneration",
        picture="<IMG_CONTEXT>",
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        text={"model_type": "qwen2"},
        vision={**_SIZES, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]},
        whole={"downsample_ratio": 0.5},
        pixels={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "size": {"height": TILE, "width": TILE},
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "llava_onevision": PictureFamily(
        config="LlavaOnevisionConfig",
        model="LlavaOnevisionForConditionalGeneration",
        tokens={"image_token_index": "<image>", "video_token_index": "<video>"},
        text={"model_type": "qwen2"},
        vision=_SIGLIP,
        whole={
            "image_grid_pinpoints": _GRID,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        pixels={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": _GRID,
            "size": {"height": TILE, "width": TILE},
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava_next": PictureFamily(
        config="LlavaNextConfig",
        model="LlavaNextForConditionalGeneration",
        tokens={"image_token_index": "<image>"},
        text={"model_type": "llama"},
        vision=_CLIP,
        whole={"image_grid_pinpoints": _GRID},
        pixels={
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _GRID,
            "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
        },
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava": PictureFamily(
        config="LlavaConfig",
        model="LlavaForConditionalGeneration",
        tokens={"image_token_index": "<image>"},
        text={"model_type": "llama"},
        vision=_CLIP,
        pixels={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "mistral3": PictureFamily(
        config="Mistral3Config",
        model="Mistral3ForConditionalGeneration",
        picture="[IMG]",
        tokens={"image_token_index": "[IMG]", "_break": "[IMG_BREAK]", "_end": "[IMG_END]"},
        text={"model_type": "mistral"},
        vision={**_SIZES, "model_type": "pixtral", "head_dim": 32, "image_size": 2 * TILE},
        whole={"spatial_merge_size": 2},
        pixels={
            "image_processor_type": "PixtralImageProcessorFast",
            "patch_size": PATCH,
            "size": {"longest_edge": 2 * TILE},
        },
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": PATCH,
            "spatial_merge_size": 2,
        },
    ),
    "glm4v": PictureFamily(
        config="Glm4vConfig",
        model="Glm4vForConditionalGeneration",
        picture=_GLM_PICTURE,
        tokens=_GLM_TOKENS,
        text={"attention_bias": True, "rope_parameters": _MROPE},
        vision=_GLM_TOWER,
        pixels=_GLM_PIXELS,
        processor={"processor_class": "Glm4vProcessor"},
    ),
    "gemma3": PictureFamily(
        config="Gemma3Config",
        model="Gemma3ForConditionalGeneration",
        picture="<start_of_image>",
        tokens={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            **{f"_{count}": "\n" * count for count in (1, 2, 3, 4)},
        },
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        text={
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 64,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision=_SIGLIP,
        whole={"mm_tokens_per_image": 16},
        pixels={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": TILE, "width": TILE},
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
    ),
    "lfm2_vl": PictureFamily(
        config="Lfm2VlConfig",
        model="Lfm2VlForConditionalGeneration",
        tokens={
            "image_token_id": "<image>",
            "_start": "<|image_start|>",
            "_end": "<|image_end|>",
            "_whole": "<|img_thumbnail|>",
            **{
                f"_{row}_{column}": f"<|img_row_{row}_col_{column}|>"
                for row in range(1, 5)
                for column in range(1, 5)
            },
        },
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        text={
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"],
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
        vision={**_SIZES, "model_type": "siglip2_vision_model", **_SIGLIP2},
        whole={"projector_hidden_size": 128, "downsample_factor": 2, "tie_word_embeddings": True},
        pixels={
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "downsample_factor": 2,
            "encoder_patch_size": PATCH,
            "tile_size": TILE,
            "min_tiles": 2,
            "max_tiles": 4,
            "min_image_tokens": 1,
            "max_image_tokens": 4,
            "use_thumbnail": True,
            "do_image_splitting": True,
        },
        processor={"processor_class": "Lfm2VlProcessor"},
    ),
    "cohere2_vision": PictureFamily(
        config="Cohere2VisionConfig",
        model="Cohere2VisionForConditionalGeneration",
        picture="<|IMG_PATCH|>",
        tokens={
            "image_token_id": "<|IMG_PATCH|>",
            "_start": "<|START_OF_IMG|>",
            "_end": "<|END_OF_IMG|>",
            "_line": "<|IMG_LINE_BREAK|>",
        },
        named={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        text={
            "model_type": "cohere2",
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision=_SIGLIP,
        whole={
            "downsample_factor": 2,
            "alignment_intermediate_size": 256,
            "tie_word_embeddings": True,
        },
        pixels={
            "image_processor_type": "Cohere2VisionImageProcessorFast",
            "patch_size": 2,
            "downsample_factor": 2,
            "size": {"height": TILE, "width": TILE},
            "min_patches": 1,
            "max_patches": 4,
        },
        processor={"processor_class": "Cohere2VisionProcessor"},
    ),
    "glm_ocr": PictureFamily(
        config="GlmOcrConfig",
        model="GlmOcrForConditionalGeneration",
        picture=_GLM_PICTURE,
        tokens=_GLM_TOKENS,
        text={"rope_parameters": _FULL_MROPE, "intermediate_size": 384},
        vision=_GLM_TOWER,
        pixels=_GLM_PIXELS,
        processor={"processor_class": "Glm46VProcessor"},
    ),
    "paddleocr_vl": PictureFamily(
        config="PaddleOCRVLConfig",
        model="PaddleOCRVLForConditionalGeneration",
        picture="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        tokens={
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
            "video_token_id": "<|video_pad|>",
        },
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        text={"rope_parameters": _FULL_MROPE},
        vision={**_SIZES, "spatial_merge_size": 2},
        pixels={
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "patch_size": PATCH,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "min_pixels": (2 * PATCH) ** 2,
            "max_pixels": (2 * TILE) ** 2,
        },
        processor={"processor_class": "PaddleOCRVLProcessor"},
    ),
    "gemma4": PictureFamily(
        config="Gemma4Config",
        model="Gemma4ForConditionalGeneration",
        picture="<|image|>",
        tokens={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "video_token_id": "<|video|>",
        },
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        text={
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "global_head_dim": 64,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_bidirectional_attention": "vision",
        },
        vision={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "position_embedding_size": 128,
            "default_output_length": 70,
        },
        whole={"audio_config": None},
        pixels={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": PATCH,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 2,
        },
        processor={
            "processor_class": "Gemma4Processor",
            "image_seq_length": 70,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
    ),
    "glm4v_moe": PictureFamily(
        config="Glm4vMoeConfig",
        model="Glm4vMoeForConditionalGeneration",
        picture=_GLM_PICTURE,
        tokens=_GLM_TOKENS,
        text={
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "rope_parameters": _MROPE,
        },
        vision=_GLM_TOWER,
        pixels=_GLM_PIXELS,
        processor={"processor_class": "Glm4vProcessor"},
    ),
    "exaone4_5": PictureFamily(
        config="Exaone4_5_Config",
        model="Exaone4_5_ForConditionalGeneration",
        picture="<|vision_start|><|image_pad|><|vision_end|>",
        tokens={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        text={
            "model_type": "exaone4",
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision={
            "depth": 2,
            "num_heads": 2,
            "num_key_value_heads": 2,
            "patch_size": PATCH,
            "hidden_size": 64,
            "out_hidden_size": 128,
            "intermediate_size": 128,
            "window_size": 2 * 2 * PATCH,
            "fullatt_block_indexes": [1],
        },
        pixels={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": PATCH,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": (2 * PATCH) ** 2,
            "max_pixels": (2 * TILE) ** 2,
        },
        processor={"processor_class": "Exaone4_5_Processor"},
    ),
}
"""Model type → parts of its tiny model."""
