"""vLLM's model of an architecture, in this process, without an engine, a cache or weights.

The engine builds the same class from the same configuration, so everything vLLM's Python does
between its layers is included. Large weights are on the meta device. The graph multiplies with
layers of its own, and code that reads a weight directly fails loudly.
"""

import contextlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig
from vllm import ir
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.registry import (
    _PREVIOUSLY_SUPPORTED_MODELS,
    ModelRegistry,
    _RegisteredModel,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.configs.errors import NoEngineModelError
from qarl.configs.words import error_text
from qarl.quant.checkpoint.whole import processor_files, served_settings
from qarl.quant.kernels.latent_attention import COLUMNS
from qarl.quant.kernels.vllm import alone
from qarl.quant.kernels.vllm_gpu import load_plugins
from qarl.quant.runtime.batch_invariance import kernel_arguments
from qarl.quant.runtime.imports import collections_paused
from qarl.quant.runtime.replaced import replaced

_SMALL = 1 << 16
"""Upper bound on the elements of a tensor with memory: cosines of few positions, correction biases,
sinks. Larger ones are on the meta device.
"""


_GPU_LAYERS = {
    "KimiLinearForCausalLM": "delta nets (KDA)",
    "OlmoHybridForCausalLM": "gated delta nets",
}
"""Architecture → layers of it for which vLLM 0.32 has Triton kernels alone. On a CPU it fails on
something else before it reaches them.
"""


_OWN_MASKS = {"DogeForCausalLM": "self_attn.A, self_attn.dt_proj"}
"""Architecture whose attention computes a mask → the weights that it is made from. vLLM's general
class for models of transformers, which it has for these, leaves such masks out.
"""


_OTHER_FREQUENCIES = {"CohereCompassForConditionalGeneration"}
"""Architecture whose rotary embedding has its frequencies in another order in vLLM's class than in
transformers', also for text.
"""


_ELSEWHERE = (
    "take another model, or sample by servers on a machine whose vLLM runs it (rollout.servers),"
    " with learner.operators 'transformers', whose log-probs agree up to rounding"
)
"""Remedy for a model that vLLM runs on other machines."""


_MISSING_FIELD = re.compile(r"'(\w+Config)' object has no attribute '(\w+)'")
"""Error of a field that vLLM reads and transformers' class of the configuration lacks."""


_PROCESSOR = "Failed to load the processor"
"""Beginning of vLLM's error of a processor. It guesses the reason, which its cause has."""


_VALIDATOR = "Class validation error for validator"
"""Beginning of the error of a class that checks its fields; the reason stands on the last line."""


_TOKENIZER = "tokenizer_config.json"
"""File beside config.json of a folder that has a tokenizer."""


_WEIGHTS = "model.safetensors"
"""An export's file of weights."""


class Skeleton:
    """vLLM's model and the state it needs around it."""

    def __init__(self, module: nn.Module, config: VllmConfig):
        self.module = module
        """The model, in eval mode."""
        self.config = config
        """vLLM's configuration."""

    @contextlib.contextmanager
    def running(self, tokens: int) -> Iterator[None]:
        """Provide the model with what its engine's step would, within this context.

        tokens: number of tokens of this forward.
        """
        with alone(), set_forward_context(None, self.config, num_tokens=tokens):
            yield


def build_skeleton(
    config: PretrainedConfig,
    architecture: str,
    quantization: dict[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Skeleton:
    """Build vLLM's model of a transformers configuration.

    Raises `NoEngineModelError` with reason and remedy if vLLM has no such model, or not quantized
    so, or if it builds one that it cannot compute or that cannot be trained.

    Args:
        config: the model's configuration.
        architecture: name of the transformers class, or of the whole that the model is a part of.
        quantization: the checkpoint's `quantization_config`.
        dtype: the engine's compute dtype.
        device: device of the forward.
    """
    load_plugins()
    folder = "config.json"
    try:
        # vLLM's tracing of some models recurses to Python's limit and gives up. Collected there,
        # other objects would have no room to be finalized in.
        with quiet(), collections_paused(), tempfile.TemporaryDirectory() as folder:
            # the config.json that an export of this model has
            written = served_settings(config, architecture)
            if quantization is not None:
                written["quantization_config"] = quantization
            (Path(folder) / "config.json").write_text(json.dumps(written))
            for file in processor_files(config):
                (Path(folder) / file.name).symlink_to(file)
            (architecture,) = written["architectures"]
            skeleton = skeleton_of(Path(folder), architecture, dtype, device)
            _refuse_other_models(architecture)
            _refuse_missing_kernels(architecture, skeleton.module)
            _refuse_constant_routers(architecture, skeleton.module)
            _refuse_scaled_sums(architecture, skeleton.module, dtype)
            _refuse_subfolders(architecture, skeleton.module)
    except NoEngineModelError:
        raise
    except Exception as error:
        # some reasons name the folder that was read
        why = _reason(error) if quantization is not None else _why(architecture, error)
        why = why.replace(folder, str(config.name_or_path or architecture))
        if quantization is not None:
            raise NoEngineModelError(
                f"vLLM does not run {architecture} in this scheme on this machine: {why}; take"
                " another scheme, or leave the layers of such shapes alone by a rule"
                " (quantization.layers, 'PATTERN=bf16')"
            ) from error
        raise NoEngineModelError(
            f"vLLM does not run {architecture} on this machine: {why}; {_remedy(architecture)}"
        ) from error
    # An engine in this process would have chosen already.
    if not ir.ops.rms_norm.get_priority():
        skeleton.config.kernel_config.ir_op_priority.set_default()
    return skeleton


def skeleton_of(
    folder: Path, architecture: str, dtype: torch.dtype, device: torch.device
) -> Skeleton:
    """Build vLLM's model of the config.json in a folder, without towers for pictures or sound.

    Raises whatever vLLM does.
    """
    _inspect_here(architecture)
    config = EngineArgs(
        model=str(folder),
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        enforce_eager=True,
        # vLLM's general class for models with pictures or sound makes the processor, which has it
        skip_tokenizer_init=not (folder / _TOKENIZER).is_file(),
        load_format="dummy",
        language_model_only=True,
        kernel_config=kernel_arguments(),  # type: ignore[arg-type]
    ).create_engine_config()
    # vLLM shares one rotary embedding of a kind in a process. The engine's must not change.
    own_rotary = replaced(rotary_embedding, _ROPE_DICT={})
    with alone(), own_rotary, set_default_torch_dtype(dtype), device, _LargeOnMeta():
        module = initialize_model(config)
    return Skeleton(module.eval(), config)


def _refuse_other_models(architecture: str) -> None:
    """Raise `NoEngineModelError` for a model that vLLM computes otherwise than transformers: its
    mask is left out, or its frequencies are in another order.
    """
    if architecture in _OTHER_FREQUENCIES:
        raise NoEngineModelError(
            f"vLLM's {architecture} and transformers' are of different models: their rotary"
            " embeddings have the same frequencies in another order, so that an engine would"
            " compute other values than the model that is trained; take another model"
        )
    if architecture in _OWN_MASKS:
        raise NoEngineModelError(
            f"vLLM does not run {architecture}: its attention computes a mask, which vLLM's general"
            f" class for models of transformers leaves out ({_OWN_MASKS[architecture]} would have"
            " no effect); take another model"
        )


def _refuse_missing_kernels(architecture: str, model: nn.Module) -> None:
    """Raise `NoEngineModelError` for layers that vLLM builds on CPUs although it cannot compute
    them.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        router: Any = getattr(module, "router", None)
        if getattr(router, "use_grouped_topk", False) and (
            router.num_expert_group is None or router.topk_group is None
        ):
            raise NoEngineModelError(
                f"vLLM does not run {architecture} on CPUs: its routers choose among groups of"
                " experts, and n_group or topk_group is null in config.json; set both (1 and 1"
                " stand for no groups)"
            )
    if any(isinstance(module, MambaMixer) for module in model.modules()):
        raise NoEngineModelError(
            f"vLLM does not run {architecture} on CPUs: its Mamba-1 layers compute a prompt by a"
            f" kernel (selective_scan_fwd) that vLLM has for GPUs alone; {_ELSEWHERE}"
        )
    for module in model.modules():
        if isinstance(module, Attention) and module.head_size_v != module.head_size:
            raise NoEngineModelError(
                f"vLLM does not run {architecture} on CPUs: its attention has keys of"
                f" {module.head_size} columns and values of {module.head_size_v} (head_dim,"
                f" v_head_dim), and vLLM's kernels for these are for GPUs alone; {_ELSEWHERE}"
            )
    for module in model.modules():
        if isinstance(module, MLAAttention):
            columns = module.kv_lora_rank, module.qk_rope_head_dim
            if columns != COLUMNS:
                raise NoEngineModelError(
                    f"vLLM does not run {architecture} on CPUs: its latent attention has"
                    " {} + {} columns (kv_lora_rank, qk_rope_head_dim), and vLLM's kernel for CPUs"
                    " {} + {}; {}".format(*columns, *COLUMNS, _ELSEWHERE)
                )
    convolutions: list[torch.Tensor] = [
        module.get_parameter("conv.weight")
        for module in model.modules()
        if isinstance(module, ShortConv)
    ]
    # vLLM's `dispatch_cpu_unquantized_gemm` packs these, which only its delta nets and Mamba-2 know
    packed = torch.cpu._is_avx512_bf16_supported()
    if packed and any(w.shape[-1] == 4 and w.dtype == torch.bfloat16 for w in convolutions):
        raise NoEngineModelError(
            f"vLLM does not run {architecture} in bfloat16 on this CPU: its short convolutions have"
            " 4 inputs (conv_L_cache), whose weights vLLM packs, and then cannot read; set dtype to"
            " float16"
        )


def _refuse_constant_routers(architecture: str, model: nn.Module) -> None:
    """Raise `NoEngineModelError` for routers through which next to no gradient goes (Phi-MoE)."""
    for module in model.modules():
        router = getattr(module, "router", None)
        choose = getattr(router, "custom_routing_function", None)
        if getattr(choose, "__name__", "") == "phimoe_routing_function":
            raise NoEngineModelError(
                f"{architecture} cannot be trained: its routers weigh an expert by a constant,"
                " unless another one's score is within 2 %, so that next to no gradient reaches"
                " them; take another model"
            )


def _refuse_scaled_sums(architecture: str, model: nn.Module, dtype: torch.dtype) -> None:
    """Raise `NoEngineModelError` for scaled sums of experts beside shared ones in float16.

    There vLLM scales the shared experts down instead of the routed ones up, so that nothing exceeds
    float16. The layers of GLM-4-MoE and Nemotron-H leave the rest of the model as it is. DeepSeek's
    scale it in place, where gradients need what was there. The comparison with transformers does
    not show it, because it computes in float32.
    """
    if dtype != torch.float16:
        return
    for module in model.modules():
        if (
            isinstance(module, MoERunner)
            and module._shared_experts is not None
            and module.routed_scaling_factor != 1.0
        ):
            raise NoEngineModelError(
                f"{architecture} cannot be trained in float16: vLLM scales its shared experts down"
                " there, instead of its routed experts up by routed_scaling_factor"
                f" ({module.routed_scaling_factor:g}), and the rest of the model by nothing, or in"
                " place of what gradients need; set dtype to bfloat16"
            )


def _refuse_subfolders(architecture: str, model: nn.Module) -> None:
    """Raise `NoEngineModelError` for a class whose weights vLLM reads from subfolders alone
    (Cosmos 3).
    """
    patterns: Any = getattr(model, "allow_patterns_overrides", None)
    if patterns and not any(fnmatch(_WEIGHTS, pattern) for pattern in patterns):
        raise NoEngineModelError(
            f"vLLM's {architecture} reads weights only from files {patterns[0]!r}, and an export"
            " has them beside its config.json; take another model"
        )


def _remedy(architecture: str) -> str:
    """Return what to do about a model that vLLM does not build on this machine."""
    if architecture in _PREVIOUSLY_SUPPORTED_MODELS:
        return "take another model"
    return _ELSEWHERE


def _why(architecture: str, error: Exception) -> str:
    """Return why vLLM does not build a model on this machine, in words that name the model's part
    where vLLM's own reason names another one.
    """
    if current_platform.is_cpu() and architecture in _GPU_LAYERS:
        return f"its {_GPU_LAYERS[architecture]} have kernels for GPUs alone"
    until = _PREVIOUSLY_SUPPORTED_MODELS.get(architecture)
    if until is not None:
        return f"vLLM supported it until {until}, and no longer does"
    if architecture not in ModelRegistry.models:
        return (
            "it has no class of that name, and its general class for models of transformers does"
            f" not take this one: {_reason(error)}"
        )
    return _reason(error)


def _reason(error: BaseException) -> str:
    """Return vLLM's error message on one line.

    Of vLLM's own checks it is without pydantic's text around, and where no kernel fits with the
    reason of the last that was asked.
    """
    if error.__cause__ is not None and str(error).startswith(_PROCESSOR):
        return f"its processor does not load: {_reason(error.__cause__)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    missing = _MISSING_FIELD.search(str(error)) if isinstance(error, AttributeError) else None
    if missing:
        return (
            f"it reads {missing[2]!r} of config.json, of which transformers' {missing[1]} has none;"
            " add the field as the model's publisher has it"
        )
    kernels = [line for line in lines if "cannot implement due to: " in line]
    if kernels:
        return f"{lines[0].partition('. ')[0]}: {kernels[-1].partition('due to: ')[2]}"
    if lines and lines[0].startswith(_VALIDATOR):
        return (
            f"its class of the configuration refuses it: {lines[-1].removeprefix('ValueError: ')}"
        )
    own = (
        line.removeprefix("Value error, ").partition(" [type=")[0]
        for line in lines
        if "Value error, " in line
    )
    if lines and lines[0].endswith(":"):  # the reason stands on the second line
        lines = [" ".join(lines[:2])]
    return next(own, lines[0] if lines else error_text(error)).rstrip(".")


def _inspect_here(architecture: str) -> None:
    """Make vLLM inspect its class in this process, which imports it anyway.

    Otherwise vLLM starts another process for it, which takes seconds.
    """
    for name in (architecture, "TransformersForCausalLM", "TransformersMoEForCausalLM"):
        entry = ModelRegistry.models.get(name)
        if entry is not None and not isinstance(entry, _RegisteredModel):
            ModelRegistry.models[name] = _RegisteredModel.from_model_cls(entry.load_model_cls())
        if name == architecture and entry is not None:
            return


class _LargeOnMeta(TorchFunctionMode):
    """Mode in which `torch.empty` allocates large tensors on the meta device.

    vLLM's layers allocate their weights by it. Small tensors are allocated on their own device.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            planned = func(*args, **{**kwargs, "device": "meta"})
            if planned.numel() > _SMALL:
                return planned
        return func(*args, **kwargs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence vLLM's warnings about an engine that does not exist, within this context.

    Logging is disabled as a whole, because vLLM's loggers set their own levels at first use.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
