"""Check of a run's schemes on this machine: the kernels, and the model's layers."""

import hashlib
import json
import os
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from qarl.configs.errors import ConfigError, GraphError, ModelError, NoEngineModelError
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.quant.checkpoint.plan import LayerPlan
from qarl.quant.checkpoint.settings import DELTA_NETS, rounding_layers
from qarl.quant.checkpoint.shapes import expert_modules
from qarl.quant.checkpoint.whole import served_settings
from qarl.quant.kernels.cpu_attention import require_head_size
from qarl.quant.kernels.supported import require_cache, require_support
from qarl.quant.model.add_lora import adapted_weights
from qarl.quant.model.kept_scales import check_scale_rule
from qarl.quant.model.ranks import require_ranks
from qarl.quant.model.surgery import refuse_changed_logits
from qarl.quant.runtime.answers import keep_answer, read_answer
from qarl.quant.runtime.batch_invariance import batch_invariant
from qarl.quant.runtime.libraries import has_vllm, refuse_namesake, refuse_split_keys
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.run.policy import Architecture, enable_batch_invariance, open_architecture

_CPU_RANKS = (2, 3, 4, 8)
"""Numbers of ranks for which vLLM 0.32 has sums and gathers in shared memory, where it has them."""
_DELTA_HEADS = (64, 128)
"""Columns of a key and a value for which vLLM 0.32 has gated delta nets on CPUs."""


def require_schemes(config: RunConfig) -> Architecture:
    """Raise an error if the run's schemes do not fit the model or cannot run on this machine.

    Returns the model's architecture. `SchemeError`: layer rules do not fit the model, a scheme
    cannot hold a shape or cannot run on this machine. `LoraError`: adapters do not fit the model.
    `NoEngineModelError`: vLLM does not run the model.
    Of the model, only config.json and the headers of its files are read.
    """
    require_kernels(config)  # before the model is located
    architecture = open_architecture(config)
    require_layers(config, architecture.skeleton, architecture.layers)
    return architecture


def require_kernels(config: RunConfig) -> None:
    """Raise `SchemeError` if the main scheme or the key-value cache cannot run on this machine.

    `InputError`: the environment holds what would change or replace what runs.
    """
    refuse_namesake()
    enable_batch_invariance(config)
    if not torch.cuda.is_available():
        refuse_split_keys()
    require_cache(config.quantization.kv_cache)
    require_support(get_scheme(config.scheme), COMPUTE_DTYPES[config.dtype])


def require_layers(config: RunConfig, model: PreTrainedModel, layers: LayerPlan) -> None:
    """Raise an error if the model's layers do not go with the configuration or this machine.

    model: the model, which may be on the meta device. layers: the scheme of each of its layers.
    """
    on_cpu = has_vllm() and not torch.cuda.is_available()
    if config.engine_here and on_cpu:
        require_head_size(config.model, model.config)
    if on_cpu:
        require_states(config, model.config.get_text_config())
    if config.engine_here and has_vllm():
        operators = config.learner.operators
        require_engine_model(model, layers, COMPUTE_DTYPES[config.dtype], operators=operators)
        quantization = layers.quantization_config(config.quantization.kv_cache)
        if quantization is not None and on_cpu:
            require_engine_model(model, layers, COMPUTE_DTYPES[config.dtype], quantization)
    if config.rollout.tensor_parallel_size > 1 and has_vllm():
        require_divisible(config, model, layers)
    check_scale_rule(config.quantization.scale, layers)
    if isinstance(config.learner.lora, LoraConfig):
        adapted_weights(layers.shapes, model.config.model_type, config.learner.lora)
    experts = tuple(f"{name}." for name in expert_modules(model))
    if experts and batch_invariant():
        raise ConfigError(
            f"bitwise true with {config.model!r}, a mixture of experts: that its routers' products"
            " are batch-invariant on GPUs has not been shown; omit bitwise"
        )
    kinds = {
        (scheme.name, name.startswith(experts)): scheme for name, scheme in layers.schemes.items()
    }
    for (_, is_expert), scheme in sorted(kinds.items(), key=itemgetter(0)):
        require_support(scheme, COMPUTE_DTYPES[config.dtype], is_expert)


def require_engine_model(
    model: PreTrainedModel,
    layers: LayerPlan,
    dtype: torch.dtype,
    quantization: dict[str, Any] | None = None,
    operators: str = "auto",
) -> None:
    """Raise `NoEngineModelError` with vLLM's reason if it has no such model on this machine, or if
    its class does not heed a setting of the model's.

    `GraphError`: the learner cannot compute through vLLM's model, and transformers' operators are
    impossible or not wanted. A model that it has is cached on disk as an answer.

    Args:
        model: the model, which may be on the meta device.
        layers: the scheme and the shape of each of its layers.
        dtype: the engine's compute dtype.
        quantization: the checkpoint's `quantization_config`. None: unquantized.
        operators: `learner.operators` of the run.
    """
    settings = json.dumps(
        [served_settings(model.config, type(model).__name__), quantization], default=str
    )
    question = {
        "config": hashlib.sha256(settings.encode()).hexdigest(),
        "dtype": str(dtype),
        "operators": operators,
    }
    if read_answer("engine model", question):
        return
    if quantization is None:
        from qarl.quant.model.engine_model import engine_model

        try:
            engine_model(model, layers.shapes, dtype)
        except NoEngineModelError:
            raise
        except GraphError as error:
            if operators == "engine":
                raise
            refuse_changed_logits(model, str(error))
    else:
        from qarl.quant.graph.skeleton import build_skeleton

        device = torch.device("cpu")
        build_skeleton(model.config, type(model).__name__, quantization, dtype, device)
    keep_answer("engine model", question, True)


def require_divisible(config: RunConfig, model: PreTrainedModel, layers: LayerPlan) -> None:
    """Raise `ConfigError` if the servers' ranks cannot divide the model, with the sizes that can.

    model: the model, which may be on the meta device. layers: the scheme of each of its layers.
    """
    from qarl.quant.model.engine_model import engine_model

    dtype = COMPUTE_DTYPES[config.dtype]
    engine = engine_model(model, layers.shapes, dtype)
    ranks = config.rollout.tensor_parallel_size
    require_ranks(ranks, engine, model.config.get_text_config(), layers, layers.shapes, dtype)


def require_servers_of_ranks(config: RunConfig) -> None:
    """Raise `ConfigError` if a run's engine cannot have the ranks that its configuration says."""
    ranks = config.rollout.tensor_parallel_size
    if ranks > 1 and config.engine_here:
        raise ConfigError(
            f"rollout.tensor_parallel_size {ranks} without rollout.servers: an engine in the run's"
            " process has one rank; give rollout.servers, a number to start or their URLs"
        )
    servers = config.rollout.servers
    if isinstance(servers, int) and not torch.cuda.is_available():
        require_room_for_ranks(config, servers)


def require_room_for_ranks(config: RunConfig, servers: int, devices: int = 1) -> None:
    """Raise `ConfigError` if this machine cannot start servers of so many ranks.

    servers: number of servers to start here. devices: GPUs of each.
    """
    ranks = config.rollout.tensor_parallel_size
    option = f"rollout.tensor_parallel_size {ranks}"
    if ranks == 1:
        return
    if torch.cuda.is_available():
        if devices < ranks:
            raise ConfigError(
                f"{option} with {devices} GPUs a server: each rank has one; give --devices {ranks}"
            )
        return
    if ranks not in _CPU_RANKS:
        sizes = ", ".join(map(str, _CPU_RANKS))
        raise ConfigError(
            f"{option}: on CPUs vLLM's ranks sum in shared memory, for {sizes} of them; choose one"
            " of these, or omit it"
        )
    cores = len(os.sched_getaffinity(0))
    if ranks * servers > cores:
        raise ConfigError(
            f"{option}, for {servers} servers on {cores} cores: each rank needs a core of its own;"
            " lower either, or start the servers on other machines (`qarl serve-rollouts`)"
        )


def require_states(config: RunConfig, model: PreTrainedConfig) -> None:
    """Raise an error if the run cannot train a model whose layers keep a state on CPUs.

    `ModelError`: vLLM's kernels do not support the heads of delta nets. `ConfigError`: they do not
    support the dtype, or the learner could not know how the engine computed each token.

    model: configuration of the language model.
    """
    layers = rounding_layers(model.to_dict(), config.dtype)
    if layers == DELTA_NETS:
        _require_delta_kernels(config, model)
    if not layers or config.learner.operators == "transformers" or not config.learner.aligned:
        return
    turns = config.task.speaks
    if turns or config.rollout.servers is not None:
        setting = "a task of several turns" if turns else "rollout.servers"
        reason = (
            "a later turn's prompt is computed by another kernel than its tokens were sampled by"
            if turns
            else "a server that interrupts a completion does not say from which token on"
        )
        raise ConfigError(
            f"{setting} with {config.model!r}: its {layers} round a prompt differently from"
            f" sampled tokens, and {reason}, so that log-probs would differ; set learner.operators"
            " to 'transformers', whose log-probs agree up to rounding"
        )


def _require_delta_kernels(config: RunConfig, model: PreTrainedConfig) -> None:
    """Raise an error if vLLM's delta nets on CPUs do not support the heads or the dtype."""
    sizes = model.linear_key_head_dim, model.linear_value_head_dim
    if sizes[0] != sizes[1] or sizes[0] not in _DELTA_HEADS:
        raise ModelError(
            f"model {config.model!r} has gated delta nets with keys of {sizes[0]} and values of"
            f" {sizes[1]} columns, and vLLM's kernels for CPUs need {_DELTA_HEADS[0]} or"
            f" {_DELTA_HEADS[1]} of both; choose another model"
        )
    if config.dtype != "bfloat16":
        raise ConfigError(
            f"dtype {config.dtype!r} with {config.model!r}: vLLM's gated delta nets on CPUs compute"
            " in bfloat16 alone; set dtype to bfloat16"
        )
