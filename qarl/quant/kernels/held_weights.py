"""Reads the weights that a running vLLM multiplies with.

Kernels repack weights into layouts of their own. So a layer is asked, not read: an identity matrix
multiplied through the layer's own product gives the weight that it multiplies with, in the compute
dtype. One part of a layer is in memory at a time.

Axes: O output rows, I input columns.
"""

import base64
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["product", "rows", "vector"]


@dataclass(frozen=True)
class HeldWeight:
    """One tensor of the running model."""

    name: str
    """Its name in vLLM's model, such as "model.layers.0.self_attn.qkv_proj.weight"."""
    layer: str
    """Module that holds it; of a vector, the parameter's own name."""
    shape: tuple[int, ...]
    """[O, I], or [O] of a vector."""
    kind: Kind
    """"product" if the layer is asked by multiplying, "rows" if it is an embedding, "vector" for
    norms and biases.
    """


class HeldWeights:
    """Mixin of vLLM's worker, for `--worker-extension-cls`; `self` is the worker.

    It changes nothing in the server. `qarl verify weights TRAINER URL` calls its methods by
    `/collective_rpc`, so they return plain data.
    """

    vllm_config: Any
    model_runner: Any

    def qarl_held_weights(self) -> dict[str, Any]:
        """Return the model's config, its quantization_config or None, the number of workers, its
        tensors, and names of layers that cannot be asked.
        """
        model_config = self.vllm_config.model_config
        tensors, others = list_weights(self.model_runner.get_model())
        return {
            "config": plain(model_config.hf_text_config.to_dict()),
            "quantization": plain(quantization_settings(model_config)),
            "workers": self.vllm_config.parallel_config.world_size,
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
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    tensors = []
    others: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LinearBase):
            shape = (module.output_size, module.input_size)
            tensors.append(HeldWeight(f"{name}.weight", name, shape, "product"))
        elif isinstance(module, VocabParallelEmbedding):
            is_head = isinstance(module, ParallelLMHead) or name.endswith("lm_head")
            shape = (module.org_vocab_size, module.embedding_dim)
            kind: Kind = "product" if is_head else "rows"
            tensors.append(HeldWeight(f"{name}.weight", name, shape, kind))
        elif hasattr(module, "quant_method") and "MoE" in type(module).__name__:
            others.setdefault("experts", []).append(name)
    tensors += [
        HeldWeight(name, name, tuple(parameter.shape), "vector")
        for name, parameter in model.named_parameters()
        if parameter.ndim == 1 and name.endswith((".bias", "norm.weight"))
    ]
    return tensors, others


def weight_part(layer: str, kind: Kind, start: int, count: int, model: nn.Module) -> torch.Tensor:
    """Return a part of a layer's weight, on the CPU.

    These are columns [O, count] from `start` of a product, rows [count, I] of an embedding, and the
    whole of a vector; of what ranks divide, this rank's.
    """
    if kind == "vector":
        return model.get_parameter(layer).detach().cpu()
    module: Any = model.get_submodule(layer)
    if kind == "rows":
        return module.weight[start : start + count].detach().cpu()
    # of a row-parallel layer a rank has some of the columns
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    columns = next(getattr(module, size) for size in sizes if hasattr(module, size))
    rows = getattr(module, "org_vocab_size", None) or module.output_size
    device = next(model.parameters()).device
    identity = torch.zeros((count, columns), dtype=_compute_dtype(model), device=device)
    identity[torch.arange(count), torch.arange(start, start + count)] = 1
    with torch.inference_mode():
        product = module.quant_method.apply(module, identity, bias=None)
    return product[:, :rows].T.contiguous().cpu()


def _compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the compute dtype, that of the norms."""
    return next(p.dtype for n, p in model.named_parameters() if n.endswith("norm.weight"))
