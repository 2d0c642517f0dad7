"""Reads the weights that a running vLLM multiplies with.

Kernels repack weights into layouts of their own. So a layer is asked, not read: an identity matrix
multiplied through the layer's own product gives the weight that it multiplies with, in the compute
dtype. One part of a layer is in memory at a time. Experts have no such product; they are asked for
their outputs of fixed inputs.

Each tensor-parallel rank answers for its own part of a layer, and says which part that is.

Axes: O output rows, I input columns, N fixed inputs, H model width.
"""

import base64
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["product", "rows", "vector", "experts"]
PROBES = 8
"""Fixed inputs of which every expert is asked for its outputs."""


@dataclass(frozen=True)
class HeldWeight:
    """One tensor of the running model, or the experts of one of its layers."""

    name: str
    """Its name in vLLM's model, such as "model.layers.0.self_attn.qkv_proj.weight"."""
    layer: str
    """Module that holds it; of a vector, the parameter's own name."""
    shape: tuple[int, ...]
    """[O, I] of this rank, [O] of a vector, (number of experts, H) of experts."""
    kind: Kind
    """"product" if the layer is asked by multiplying, "rows" if it is an embedding, "vector" for
    norms and biases, "experts" for routed experts.
    """
    parts: tuple[int, ...] = ()
    """Output rows of this rank in each of the layers that are fused into this one; () if every rank
    has all rows.
    """
    repeats: tuple[int, ...] = ()
    """Number of neighbouring ranks with the same rows, for each of `parts`."""
    divided_columns: bool = False
    """Whether this rank has some of the input columns alone."""


class HeldWeights:
    """Mixin of vLLM's worker, for `--worker-extension-cls`; `self` is the worker.

    It changes nothing in the server. `qarl verify weights TRAINER URL` calls its methods by
    `/collective_rpc`, so they return plain data.
    """

    vllm_config: Any
    model_runner: Any

    def qarl_held_weights(self) -> dict[str, Any]:
        """Return the model's config, its quantization_config or None, the number of pipeline
        stages, this rank's tensors, and names of layers that cannot be asked.
        """
        model_config = self.vllm_config.model_config
        tensors, others = list_weights(self.model_runner.get_model())
        return {
            "config": plain(model_config.hf_text_config.to_dict()),
            "quantization": plain(quantization_settings(model_config)),
            "stages": self.vllm_config.parallel_config.pipeline_parallel_size,
            "expert_parallel": self.vllm_config.parallel_config.enable_expert_parallel,
            "tensors": [asdict(tensor) for tensor in tensors],
            "others": others,
        }

    def qarl_weight_part(self, layer: str, kind: Kind, start: int, count: int) -> dict[str, Any]:
        """Return `weight_part` as its dtype, shape and base64 of its bytes."""
        part = weight_part(layer, kind, start, count, self.model_runner.get_model())
        data = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {
            "dtype": str(part.dtype).removeprefix("torch."),
            "shape": list(part.shape),
            "data": base64.b64encode(data).decode(),
        }


def quantization_settings(model_config: Any) -> dict[str, Any] | None:
    """Return the quantization_config of vLLM's model config; None if the model has none."""
    return getattr(model_config.hf_config, "quantization_config", None)


def plain(value: Any) -> Any:
    """Return settings as JSON has them; what JSON lacks becomes text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def list_weights(model: nn.Module) -> tuple[list[HeldWeight], dict[str, list[str]]]:
    """Return the tensors of a running model, and names of layers of other kinds."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    tensors = []
    others: dict[str, list[str]] = {}
    # An experts' runner has the router, too; a tied head is listed under both its names.
    linear = {name for name, module in model.named_modules() if isinstance(module, LinearBase)}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in linear:
            tensors.append(_linear(name, module))
        elif isinstance(module, VocabParallelEmbedding):
            tensors.append(_vocabulary(name, module))
        elif isinstance(module, RoutedExperts):
            if module.quant_method.is_monolithic or module.activation.value != "silu":
                others.setdefault("experts", []).append(name)
            else:
                shape = (module.global_num_experts, module.hidden_size)
                tensors.append(HeldWeight(name, name, shape, "experts"))
    tensors += [
        _vector(name, parameter, model)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 1 and name.endswith((".bias", "norm.weight"))
    ]
    return tensors, others


def _linear(name: str, module: Any) -> HeldWeight:
    parts, repeats = _rows_of_rank(module)
    rows = sum(parts) or module.output_size
    columns = getattr(module, "input_size_per_partition", module.input_size)
    return HeldWeight(
        name=f"{name}.weight",
        layer=name,
        shape=(rows, columns),
        kind="product",
        parts=parts,
        repeats=repeats,
        divided_columns=columns != module.input_size,
    )


def _rows_of_rank(module: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `HeldWeight.parts` and `repeats` of a linear layer."""
    if module.tp_size == 1 or not hasattr(module, "output_size_per_partition"):
        return (), ()
    if module.output_size_per_partition == module.output_size:  # divided by its columns
        return (), ()
    parts = tuple(module.output_partition_sizes)
    heads = getattr(module, "num_kv_head_replicas", 1)
    return parts, tuple(heads if n else 1 for n in range(len(parts)))


def _vocabulary(name: str, module: Any) -> HeldWeight:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    is_head = isinstance(module, ParallelLMHead) or name.endswith("lm_head")
    rows = module.shard_indices.num_org_elements
    divided = rows != module.org_vocab_size
    return HeldWeight(
        name=f"{name}.weight",
        layer=name,
        shape=(rows, module.embedding_dim),
        kind="product" if is_head else "rows",
        parts=(rows,) if divided else (),
        repeats=(1,) if divided else (),
    )


def _vector(name: str, parameter: nn.Parameter, model: nn.Module) -> HeldWeight:
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    parts: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    if name.endswith(".bias") and hasattr(owner, "tp_size"):
        parts, repeats = _rows_of_rank(owner)
    return HeldWeight(
        name=name,
        layer=name,
        shape=tuple(parameter.shape),
        kind="vector",
        parts=parts,
        repeats=repeats,
    )


def weight_part(layer: str, kind: Kind, start: int, count: int, model: nn.Module) -> torch.Tensor:
    """Return a part of a layer's weight, on the CPU.

    These are columns [O, count] from `start` of a product, rows [count, I] of an embedding, the
    whole of a vector, and the outputs [count, N, H] of experts; of what ranks divide, this rank's.
    """
    if kind == "vector":
        return model.get_parameter(layer).detach().cpu()
    module: Any = model.get_submodule(layer)
    if kind == "rows":
        return module.weight[start : start + count].detach().cpu()
    if kind == "experts":
        return _outputs(module, range(start, start + count), model)
    # of a row-parallel layer a rank has some of the columns
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    columns = next(getattr(module, size) for size in sizes if hasattr(module, size))
    shard = getattr(module, "shard_indices", None)
    rows = module.output_size if shard is None else shard.num_org_elements
    device = next(model.parameters()).device
    identity = torch.zeros((count, columns), dtype=_compute_dtype(model), device=device)
    identity[torch.arange(count), torch.arange(start, start + count)] = 1
    with torch.inference_mode():
        output = module.quant_method.apply(module, identity, bias=None)
    return output[:, :rows].T.contiguous().cpu()


def probes(width: int) -> torch.Tensor:
    """Return the fixed inputs of experts, fp32 [N, H], of values that 16-bit dtypes have too."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((PROBES, width), generator=generator).bfloat16().float()


def _outputs(experts: Any, numbers: range, model: nn.Module) -> torch.Tensor:
    """Return the outputs of some experts of the fixed inputs, each with weight 1, [E, N, H]."""
    device = next(model.parameters()).device  # quantized experts may have no parameter left
    x = probes(experts.hidden_size).to(device, _compute_dtype(model))
    total = experts.global_num_experts
    # Kernels may want as many experts a token as the model has; the others weigh nothing.
    weights = torch.zeros((PROBES, experts.top_k), dtype=torch.float32, device=device)
    weights[:, 0] = 1
    kind = experts.quant_method.topk_indices_dtype or torch.int32
    parts = []
    for number in numbers:
        index = (number + torch.arange(experts.top_k, device=device)) % total
        index = index.to(kind).expand(PROBES, -1).contiguous()
        with torch.inference_mode():
            parts.append(experts.forward_modular(x.clone(), weights, index).float().cpu())
    return torch.stack(parts)


def _compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the compute dtype, that of the norms."""
    return next(p.dtype for n, p in model.named_parameters() if n.endswith("norm.weight"))
