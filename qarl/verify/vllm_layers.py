"""Weights of a running vLLM, as its kernels multiply them.

Kernels repack weights into layouts of their own. So a layer is asked, not read: an identity matrix
multiplied through the layer's own product gives the weight that it multiplies with, in the compute
dtype. One layer at a time is in memory.

Axes: O output rows, I input columns.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from qarl.verify.findings import VerifyInputError
from qarl.verify.names import Stored

if TYPE_CHECKING:
    import torch
    from torch import nn

_ROWS = 512
"""Rows of the identity that are multiplied together."""


def read_engine(
    llm: Any,
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Stored], tuple[str, ...]]:
    """Return the config, the quantization_config or None, the tensors by name, and what cannot be
    read.

    Raises `VerifyInputError` if the engine's layers are split over several workers.
    """
    parallel = llm.llm_engine.vllm_config.parallel_config
    if parallel.world_size > 1:
        raise VerifyInputError(
            f"the engine has {parallel.world_size} workers, each with a part of every layer; open"
            " it with tensor_parallel_size 1, or compare the checkpoint that it loads"
        )
    model = llm.llm_engine.model_config
    settings = getattr(model.hf_config, "quantization_config", None)
    (listed,) = llm.apply_model(_list_tensors)
    matrices, vectors, others = listed
    tensors = {}
    for name, layer, shape in matrices:
        tensors[name] = Stored(shape, partial(_ask, llm, partial(_multiplied, layer)), _no_part)
    for name, shape in vectors:
        tensors[name] = Stored(shape, partial(_ask, llm, partial(_parameter, name)), _no_part)
    unread = tuple(
        f"the engine's {kind} (such as {names[0]}): they have no product to ask, compare the"
        " checkpoint that the engine loads"
        for kind, names in others.items()
    )
    return model.hf_text_config.to_dict(), settings, tensors, unread


def _ask(llm: Any, function: Any) -> "torch.Tensor":
    return llm.apply_model(function)[0]


def _no_part(index: int) -> "torch.Tensor":
    raise AssertionError("an engine's tensor is read whole")


def _list_tensors(model: "nn.Module") -> tuple[list, list, dict[str, list[str]]]:
    """Return (name, layer, shape) of matrices, (name, shape) of vectors, and layers of other kinds.

    This runs in the worker.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    matrices = []
    others: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LinearBase):
            shape = (module.output_size, module.input_size)
            matrices.append((f"{name}.weight", name, shape))
        elif isinstance(module, VocabParallelEmbedding):
            is_head = isinstance(module, ParallelLMHead) or name.endswith("lm_head")
            shape = (module.org_vocab_size, module.embedding_dim)
            matrices.append((f"{name}.weight", name if is_head else f"={name}", shape))
        elif hasattr(module, "quant_method") and "MoE" in type(module).__name__:
            others.setdefault("experts", []).append(name)
    vectors = [
        (name, tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.ndim == 1 and name.endswith((".bias", "norm.weight"))
    ]
    return matrices, vectors, others


def _multiplied(layer: str, model: "nn.Module") -> "torch.Tensor":
    """Return the weight [O, I] that a layer multiplies with; of an embedding, its rows.

    layer: name; "=" before it marks an embedding. This runs in the worker.
    """
    import torch

    module: Any = model.get_submodule(layer.removeprefix("="))
    if layer.startswith("="):
        return module.weight[: module.org_vocab_size].detach().cpu()
    columns = getattr(module, "input_size", None) or module.embedding_dim
    rows = getattr(module, "org_vocab_size", None) or module.output_size
    first = next(model.parameters())
    parts = []
    for start in range(0, columns, _ROWS):
        count = min(_ROWS, columns - start)
        identity = torch.zeros((count, columns), dtype=_dtype(model), device=first.device)
        identity[torch.arange(count), torch.arange(start, start + count)] = 1
        with torch.inference_mode():
            product = module.quant_method.apply(module, identity, bias=None)
        parts.append(product[:, :rows].T.contiguous().cpu())
    return torch.cat(parts, 1)


def _dtype(model: "nn.Module") -> "torch.dtype":
    """Return the compute dtype, that of the norms."""
    return next(p.dtype for n, p in model.named_parameters() if n.endswith("norm.weight"))


def _parameter(name: str, model: "nn.Module") -> "torch.Tensor":
    """Return a parameter. This runs in the worker."""
    return model.get_parameter(name).detach().cpu()
