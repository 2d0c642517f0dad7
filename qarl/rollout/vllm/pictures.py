"""Pictures in vLLM's engine: their requests, and what the engine's tower makes of them.

The learner takes the tower's output from the engine, as inputs of the language model, so both have
the same bits. vLLM encodes all pictures of a step in one batch, whose number of rows may decide the
last bits. Here it encodes every picture alone, so that its output depends on the picture alone.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.clip import CLIPVisionModel
from vllm.model_executor.models.interfaces import supports_mrope
from vllm.model_executor.models.lfm2_siglip2 import Siglip2Model
from vllm.model_executor.models.siglip import SiglipVisionModel
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing.context import InputProcessingContext
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.transformers_utils import processor
from vllm.v1.worker import gpu_model_runner

from qarl.rollout.engine import EngineError
from qarl.rollout.picture_processors import NoVideos, own_class, without_videos
from qarl.rollout.pictures import open_picture
from qarl.rollout.types import EmbeddedPictures, Prompt

_PICTURES = "image"
"""vLLM's name of this kind of input."""
_PART = "vision_model."
"""Beginning of a published tower's names."""
_CACHE_GIB = 0.25
"""Size of vLLM's cache of preprocessed pictures, which the samples of a prompt share."""


def picture_arguments(most: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for prompts of up to `most` pictures.

    vLLM would encode the largest picture at its start to see how much memory that takes. The cache
    has a size in bytes, so nothing depends on it.
    """
    _load_processors_without_videos()
    _load_flat_towers()
    return {
        "limit_mm_per_prompt": {_PICTURES: most, "video": 0},
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": _CACHE_GIB,
        "skip_mm_profiling": True,
    }


def picture_input(prompt: Prompt) -> dict[str, Any]:
    """Return vLLM's input of a prompt with pictures."""
    assert prompt.pictures is not None
    pictures = [open_picture(file) for file in prompt.pictures.files]
    return {
        "prompt_token_ids": list(prompt.pictures.token_ids),
        "multi_modal_data": {_PICTURES: pictures},
    }


def _load_processors_without_videos() -> None:
    """Make vLLM load the processors that `load_processor` loads. Idempotent.

    vLLM 0.32 asks for transformers' classes by name. Remove this with `without_videos`.
    """
    context: Any = InputProcessingContext
    load = vars(context).get("get_hf_processor")
    assert load is not None, "vLLM no longer loads processors there"
    if getattr(load, "without_videos", False):
        return

    @functools.wraps(load)
    def load_without_videos(self: Any, kind: Any = None, /, **more: Any) -> Any:
        with without_videos():
            return load(self, own_class(kind), **more)

    load_without_videos.without_videos = True  # type: ignore[attr-defined]
    context.get_hf_processor = load_without_videos
    # InternVL's part for videos is loaded apart
    assert hasattr(processor, "cached_get_video_processor"), "vLLM no longer loads videos' there"
    loaders: Any = processor
    loaders.AutoVideoProcessor = NoVideos
    loaders.cached_get_video_processor = NoVideos.from_pretrained


def _load_flat_towers() -> None:
    """Make vLLM load CLIP's and SigLIP's towers by the names that transformers 5.19 writes, too.

    Published files have "vision_model." before them. vLLM 0.32 knows these names alone. Idempotent.
    Remove this when it knows both.
    """
    kinds: tuple[Any, ...] = (CLIPVisionModel, SiglipVisionModel, Siglip2Model)
    for kind in kinds:
        load = vars(kind).get("load_weights", _load_all)
        if not hasattr(load, "__wrapped__"):
            kind.load_weights = _by_either_names(load)


def _load_all(tower: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    return AutoWeightsLoader(tower).load_weights(weights)


def _by_either_names(load: Any) -> Any:
    """Return a tower's loader that takes names with and without "vision_model." before them."""

    @functools.wraps(load)
    def load_either(tower: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load(tower, ((_PART + name.removeprefix(_PART), tensor) for name, tensor in weights))

    return load_either


class Tower:
    """The engine's part for pictures, which encodes one picture at a time.

    It remembers what it made of the pictures that are being sampled for, so that sampler and
    learner have one tensor.

    Args:
        llm: vLLM's engine.
        runner: its model runner, in this process.
    """

    def __init__(self, llm: Any, runner: Any):
        self._llm = llm
        self._runner = runner
        self._outputs: dict[bytes, list[torch.Tensor]] = {}
        self._encode = runner.model.embed_multimodal
        assert hasattr(gpu_model_runner, "group_and_batch_mm_kwargs"), (
            "vLLM no longer batches pictures where they are separated here"
        )
        stepping: Any = gpu_model_runner
        stepping.group_and_batch_mm_kwargs = _one_by_one
        runner.model.embed_multimodal = self._encoded

    def forget(self) -> None:
        """Free what the tower made of earlier pictures."""
        self._outputs.clear()

    def embedded(self, prompt: Prompt) -> EmbeddedPictures:
        """Return what the tower makes of a prompt's pictures, and where it stands in the prompt.

        Raises `EngineError` if vLLM makes other tokens of the prompt than the model's processor.
        """
        parsed = parse_model_prompt(self._llm.model_config, picture_input(prompt))  # type: ignore[arg-type]
        # The cache would hand out nothing for pictures that it has sent to the engine before.
        (rendered,) = self._llm.renderer.render_cmpl([parsed], skip_mm_cache=True)
        tokens = tuple(rendered["prompt_token_ids"])
        if tokens != prompt.token_ids:
            assert prompt.pictures is not None
            count = len(prompt.pictures.files)
            remedy = (
                "the processor's files (preprocessor_config.json, processor_config.json) contradict"
                " config.json: copy the model again"
                if count == 1
                else "vLLM may take each for the only one, as it does for LLaVA-OneVision: set"
                " rollout.pictures to 1"
            )
            raise EngineError(
                f"vLLM makes {len(tokens)} tokens of prompt {prompt.id!r} with {count} pictures,"
                f" and the model folder's processor {len(prompt.token_ids)} or others; {remedy}"
            )
        spans = rendered["mm_placeholders"][_PICTURES]
        kwargs = rendered["mm_kwargs"][_PICTURES]
        places = []
        for span in spans:
            within = torch.arange(span.length)
            is_row = span.is_embed
            places.append(span.offset + (within if is_row is None else within[is_row]))
        items = [(_PICTURES, item) for item in kwargs]
        with torch.inference_mode():
            rows = [
                output
                for _, _, arguments in _one_by_one(items, device=self._runner.device)
                for output in self._runner.model.embed_multimodal(**arguments)
            ]
        # copies outside of inference mode, which autograd may save
        return EmbeddedPictures(
            rows=torch.cat(rows).clone(),
            places=torch.cat(places),
            positions=self._positions(tokens, spans, kwargs),
            sees=self._sees(prompt, spans),
        )

    def _sees(self, prompt: Prompt, spans: Sequence[Any]) -> torch.Tensor | None:
        """Return the number of leading tokens that each token of a prompt sees, int64 [T]; None if
        the model's tokens see those before them and themselves.

        Raises `EngineError` if a picture ends where the window of a layer is no longer at the
        prompt's beginning, because the kernel would leave out keys that the picture's tokens see.
        """
        if not self._runner.is_mm_prefix_lm:
            return None
        sees = torch.arange(1, len(prompt.token_ids) + 1)
        end = 0
        for span in spans:
            for first, last in span.extract_embeds_range():
                sees[first : last + 1] = last + 1
                end = max(end, last + 1)
        windows = [
            module.sliding_window
            for module in self._runner.model.modules()
            if isinstance(module, Attention) and module.sliding_window
        ]
        if windows and end > min(windows):
            raise EngineError(
                f"the last picture of prompt {prompt.id!r} ends at its token {end}, and layers of"
                f" this model have windows of {min(windows)} tokens, within which its pictures must"
                f" end; ask with fewer or smaller pictures, or set rollout.max_prompt_tokens to"
                f" {min(windows)}"
            )
        return sees

    def _positions(
        self, tokens: Sequence[int], spans: Sequence[Any], kwargs: Sequence[Any]
    ) -> torch.Tensor | None:
        """Return the engine's positions of a prompt's tokens on three axes, int64 [T, 3], by the
        function that it calls; None if the model has one axis.
        """
        model = self._runner.model
        if not (self._runner.uses_mrope and supports_mrope(model)):
            return None
        features = [
            MultiModalFeatureSpec(data=item, modality=_PICTURES, identifier="", mm_position=span)
            for item, span in zip(kwargs, spans, strict=True)
        ]
        positions, _ = model.get_mrope_input_positions(list(tokens), features)
        return positions.T.contiguous()

    def _encoded(self, **arguments: Any) -> list[torch.Tensor]:
        """Return the tower's output for one picture, from memory if it was encoded before."""
        key = _digest(arguments)
        if key not in self._outputs:
            self._outputs[key] = list(self._encode(**arguments))
        return self._outputs[key]


def _one_by_one(
    mm_kwargs: Sequence[tuple[str, Any]], **more: Any
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield vLLM's batches of inputs, each of one input alone."""
    for item in mm_kwargs:
        yield from group_and_batch_mm_kwargs([item], **more)


def _digest(arguments: Mapping[str, Any]) -> bytes:
    """Return a digest of the tower's arguments: names, shapes, dtypes and bytes of tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arguments):
        value = arguments[name]
        # pictures of several sizes are a list
        tensors = [value] if isinstance(value, torch.Tensor) else list(value)
        for tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()
