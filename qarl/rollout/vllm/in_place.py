"""What CUDA graphs read beside parameters and buffers, kept in place over a publish.

vLLM's reload refills parameters and buffers where they are, and prepares kernels anew, whose
strides, locks and scales are other tensors afterwards: a graph would read the freed ones. Here the
old ones get the new values, and their places back. Blind spot: tensors in closures and in objects
of C++.
"""

from types import ModuleType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from qarl.rollout.engine import EngineError

Beside = dict[str, tuple[Any, Any, torch.Tensor]]
"""By where it hangs: what holds a tensor, under which key, and the tensor."""


def tensors_beside(model: nn.Module) -> Beside:
    """Of all layers that vLLM processes, those that are no parameter or buffer of a module of the
    model.
    """
    modules = list(model.modules())
    seen = {id(part) for m in modules for part in (m, m._parameters, m._buffers, m._modules)}
    beside: Beside = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
            _walk(name, vars(module), seen, beside)
    return beside


def _walk(path: str, holder: Any, seen: set[int], beside: Beside) -> None:
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if isinstance(value, torch.Tensor):
            beside[f"{path}.{key}"] = holder, key, value
        elif id(value) not in seen and not isinstance(value, ModuleType):
            seen.add(id(value))
            inside = (
                value
                if isinstance(value, dict | list | tuple)
                else getattr(value, "__dict__", None)
            )
            if isinstance(inside, dict | list | tuple):  # a class's is none of these
                _walk(f"{path}.{key}", inside, seen, beside)


def put_back(before: Beside, model: nn.Module, graphs: bool) -> None:
    """Copy what `tensors_beside` finds now into what it found before, and put that back in its
    place.

    graphs: raise `EngineError` where that is not possible; without CUDA graphs the new tensors stay
    there.
    """
    after = tensors_beside(model)
    for path, (_, _, old) in before.items():
        holder, key, new = after.get(path, ((), None, None))
        if new is old:
            continue
        alike = new is not None and (new.shape, new.stride(), new.dtype) == (
            old.shape,
            old.stride(),
            old.dtype,
        )
        if new is not None and alike and 0 not in old.stride() and not isinstance(holder, tuple):
            old.copy_(new)
            holder[key] = old
        elif graphs:
            raise EngineError(
                f"CUDA graphs read {path}, {tuple(old.shape)} {old.dtype}, which a publish replaces"
                " and cannot refill; set rollout.enforce_eager true"
            )
