"""`qarl.align`: makes a policy over low-bit tensors of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from qarl.api.policy import Policy
from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.load import config_from_tree
from qarl.learner.gradient_gate import require_gradients
from qarl.learner.processes import Processes
from qarl.preflight.support import require_kernels, require_layers, require_schemes
from qarl.quant.checkpoint.load import check_finite
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.schemes import MASTER_DTYPES, get_scheme
from qarl.run.policy import load_model, model_folder, wrap_masters

_WRAPPERS = {
    "peft": (
        "merge its adapters (merge_and_unload()) or give the base; QaRL's own are learner.lora of"
        " `qarl train`"
    ),
    "torch.nn.parallel": (
        "give the model inside it (.module); several processes are `qarl train --processes N`"
    ),
    "torch.distributed": (
        "align the model before it is sharded; several processes are `qarl train --processes N`"
    ),
    "deepspeed": "align the model first, and give the policy to deepspeed.initialize",
    "torch._dynamo": "align the model before torch.compile",
    "qarl": "it is aligned already; load the model anew to align it otherwise",
}
"""Modules of classes that wrap a model, with the remedy for each."""
_OPTIONS = (
    "operators",
    "kernel",
    "gradient_checkpointing",
    "keep_codes",
    "compile",
    "input_gradients",
    "packing",
    "share_prompts",
    "micro_batch_tokens",
    "logprob_chunk_tokens",
)
"""Fields of `learner.*` that apply to a policy."""


def align(
    model: str | Path | PreTrainedModel,
    scheme: str = "w4a16",
    *,
    dtype: str | torch.dtype = "bfloat16",
    master_dtype: str | torch.dtype = "float32",
    layers: Sequence[str] = (),
    tokenizer: str | Path | None = None,
    **learner: Any,
) -> Policy:
    """Make a policy whose forward multiplies the low-bit tensors that its engine samples from.

    Args:
        model: An embedded policy's name, a folder in transformers' format, a hub id, or a
            transformers causal LM, whose parameters become the masters in place.
        scheme: One of `qarl schemes`.
        dtype: Dtype of activations in policy and engine: "bfloat16", "float16", "float32" or
            torch's.
        master_dtype: Dtype of the trained masters, likewise.
        layers: Other schemes for some layers, each "PATTERN=SCHEME" (docs/guide/layers.md).
        tokenizer: Folder or hub id of the tokenizer, for a model built in memory.
        learner: The fields of `learner.*` that apply to a policy (docs/reference/options.md), such
            as gradient_checkpointing.

    Raises:
        ModelError: The model is missing, quantized, wrapped (PEFT, FSDP, DDP, DeepSpeed, compiled)
            or frozen in part.
        SchemeError: The model cannot take the scheme.
        ConfigError: An option is unknown or out of range.
        KernelError, GraphError: This machine cannot run the policy, or no gradient would reach a
            master.
    """
    for name in learner.keys() - {*_OPTIONS}:
        raise ConfigError(
            f"align has no option {name!r}; of learner.* a policy takes {', '.join(_OPTIONS)}"
        )
    source = _source_of(model, tokenizer) if isinstance(model, torch.nn.Module) else str(model)
    rules = layers if isinstance(layers, str) else list(layers)
    settings = config_from_tree(
        {
            "model": source,
            "scheme": scheme,
            "layers": rules,
            "dtype": str(dtype).removeprefix("torch."),
            "learner": {
                "master_dtype": str(master_dtype).removeprefix("torch."),
                **learner,
            },
        }
    )
    processes = Processes()
    if isinstance(model, PreTrainedModel):
        require_kernels(settings)
        folder = model_folder(source)
        schemes = plan_layers(model, get_scheme(settings.scheme), settings.layers)
        require_layers(settings, model, schemes)
        check_finite(source, model.eval())
        # Parameters only, not buffers: rotary frequencies stay fp32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(
                processes.device, MASTER_DTYPES[settings.learner.master_dtype]
            )
        low_bit = wrap_masters(model, settings, schemes)
    else:
        architecture = require_schemes(settings)
        folder = architecture.folder
        low_bit = load_model(settings, architecture, settings.learner, processes)
    policy = Policy(low_bit, settings, model_folder(str(tokenizer)) if tokenizer else folder)
    if low_bit.operators == "engine":
        require_gradients(low_bit, processes)
    return policy


def _source_of(model: Any, tokenizer: str | Path | None) -> str:
    """Return the folder or hub id of a model in memory, or that of its tokenizer.

    Raises `ModelError` for a model that cannot be aligned.
    """
    kind = type(model)
    origins = [kind.__module__, *(["peft"] if hasattr(model, "peft_config") else [])]
    origins += [type(p).__module__ for p in model.parameters() if isinstance(p, DTensor)][:1]
    for module, remedy in _WRAPPERS.items():
        if any(origin.startswith(module) for origin in origins):
            raise ModelError(f"model is a {kind.__name__} ({module}); {remedy}")
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model is a {kind.__name__}; give a transformers causal LM, a folder, or a hub id"
        )
    quantization = getattr(model.config, "quantization_config", None)
    for name, parameter in model.named_parameters():
        if quantization or not parameter.is_floating_point():
            method = getattr(quantization, "quant_method", quantization)
            raise ModelError(
                f"model's parameter {name!r} is quantized already ({method}); load it without"
                " quantization_config, from its original checkpoint"
            )
        if parameter.is_meta:
            raise ModelError(
                f"model's parameter {name!r} has no values (meta device); load them first"
            )
        if not parameter.requires_grad:
            raise ModelError(
                f"model's parameter {name!r} is frozen, and every parameter is trained; call"
                " model.requires_grad_(True)"
            )
    if not (tokenizer or model.name_or_path):
        raise ModelError(
            f"{kind.__name__} was built in memory; give align its tokenizer, a folder or hub id"
        )
    return str(tokenizer or model.name_or_path)
