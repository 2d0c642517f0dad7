"""Keeps tensors at the addresses that CUDA graphs read, when a publish replaces them.

vLLM's reload refills parameters and buffers in place. It also prepares kernels anew, whose strides,
locks and scales then are new tensors, neither parameters nor buffers: a graph would read the freed
ones. This module copies the new values into the old tensors and puts those back.

Blind spot: tensors in closures and in C++ objects.
"""

from types import ModuleType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from qarl.rollout.engine import EngineError

KernelTensors = dict[str, tuple[Any, Any, torch.Tensor]]
"""Path → (container of the tensor, its key in the container, the tensor)."""


def unregistered_tensors(model: nn.Module) -> KernelTensors:
    """Return the tensors of all layers that vLLM processes, except parameters and buffers."""
    seen: set[int] = set()
    for module in model.modules():
        parts = (module, module._parameters, module._buffers, module._modules)
        seen.update(id(part) for part in parts)
    tensors: KernelTensors = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
            _walk(name, vars(module), seen, tensors)
    return tensors


def _walk(path: str, holder: Any, seen: set[int], tensors: KernelTensors) -> None:
    """Add the tensors in `holder`, and in the objects that it refers to, to `tensors`.

    seen: ids of objects that are not visited again.
    """
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if isinstance(value, torch.Tensor):
            tensors[f"{path}.{key}"] = holder, key, value
        elif id(value) not in seen and not isinstance(value, ModuleType):
            seen.add(id(value))
            is_container = isinstance(value, dict | list | tuple)
            content = value if is_container else getattr(value, "__dict__", None)
            # The `__dict__` of a class is a mapping proxy, none of these.
            if isinstance(content, dict | list | tuple):
                _walk(f"{path}.{key}", content, seen, tensors)


def _layout(
    tensor: torch.Tensor,
) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def put_back(before: KernelTensors, model: nn.Module, graphs: bool) -> None:
    """Copy the values of the model's present tensors into those of `before`, and put these back.

    graphs: raise `EngineError` for a tensor that cannot be refilled. Without CUDA graphs the new
    tensor is used instead.
    """
    after = unregistered_tensors(model)
    for path, (_, _, old) in before.items():
        holder, key, new = after.get(path, ((), None, None))
        if new is old:
            continue
        same_layout = new is not None and _layout(new) == _layout(old)
        expanded = 0 in old.stride()
        # Neither an expanded tensor nor a tuple can be written.
        if new is not None and same_layout and not expanded and not isinstance(holder, tuple):
            old.copy_(new)
            holder[key] = old
        elif graphs:
            raise EngineError(
                f"CUDA graphs read {path}, {tuple(old.shape)} {old.dtype}, which a publish replaces"
                " and cannot refill; set rollout.enforce_eager true"
            )
