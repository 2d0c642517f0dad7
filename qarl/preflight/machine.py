"""Check of a run's schemes on this machine: the kernels, and the model's layers."""

from operator import itemgetter

import torch
from transformers import PreTrainedModel

from qarl.configs.errors import ConfigError
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.quant.checkpoint.plan import Plan
from qarl.quant.checkpoint.shapes import expert_modules, weight_shapes
from qarl.quant.kernels.cpu_attention import require_head_size
from qarl.quant.kernels.supported import require_cache, require_support
from qarl.quant.model.add_lora import adapted_weights
from qarl.quant.model.kept_scales import check_scale_rule
from qarl.quant.runtime.batch_invariance import batch_invariant
from qarl.quant.runtime.libraries import has_vllm, refuse_split_keys
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.run.policy import Architecture, enable_batch_invariance, open_architecture


def require_schemes(config: RunConfig) -> Architecture:
    """Raise an error if the run's schemes do not fit the model or cannot run on this machine.

    Returns the model's architecture. `SchemeError`: layer rules do not fit the model, a scheme
    cannot hold a shape or cannot run on this machine. `LoraError`: adapters do not fit the model.
    Of the model, only config.json and the headers of its files are read.
    """
    require_kernels(config)  # before the model is located
    architecture = open_architecture(config)
    require_layers(config, architecture.skeleton, architecture.layers)
    return architecture


def require_kernels(config: RunConfig) -> None:
    """Raise `SchemeError` if the main scheme or the key-value cache cannot run on this machine."""
    enable_batch_invariance(config)
    if not torch.cuda.is_available():
        refuse_split_keys()
    require_cache(config.quantization.kv_cache)
    require_support(get_scheme(config.scheme), COMPUTE_DTYPES[config.dtype])


def require_layers(config: RunConfig, model: PreTrainedModel, layers: Plan) -> None:
    """Raise an error if the model's layers do not go with the configuration or this machine.

    model: the model, which may be on the meta device. layers: the scheme of each of its layers.
    """
    if config.engine_here and has_vllm() and not torch.cuda.is_available():
        require_head_size(config.model, model.config)
    check_scale_rule(config.quantization.scale, layers)
    if isinstance(config.learner.lora, LoraConfig):
        adapted_weights(weight_shapes(model), model.config.model_type, config.learner.lora)
    experts = tuple(f"{name}." for name in expert_modules(model))
    if experts and batch_invariant():
        raise ConfigError(
            f"bitwise true with {config.model!r}, a mixture of experts: that its routers' products"
            " are batch-invariant on GPUs has not been shown; leave bitwise out"
        )
    kinds = {
        (scheme.name, name.startswith(experts)): scheme for name, scheme in layers.schemes.items()
    }
    for (_, is_expert), scheme in sorted(kinds.items(), key=itemgetter(0)):
        require_support(scheme, COMPUTE_DTYPES[config.dtype], is_expert)
