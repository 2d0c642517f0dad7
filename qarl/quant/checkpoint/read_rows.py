"""Reading a checkpoint in a process that keeps only some rows (`quant.runtime.shards`).

transformers slices the files of a parameter that is a DTensor, and of a stack reads this process's
experts alone. So parameters are shared as the model's modules register them, before anything is
read.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from qarl.quant.runtime.shards import share


@contextmanager
def reading_rows(mesh: DeviceMesh) -> Iterator[None]:
    """Share the parameters of every module that is built within this context.

    Stacks with fewer experts than leave every process one are read whole, and shared as they are
    set, because transformers cannot put together a stack of no experts.
    """

    def shared(_: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:  # None or another
        if parameter is None or isinstance(parameter, DTensor):
            return None
        if parameter.is_meta and _leaves_out_processes(parameter.shape, mesh.size()):
            return None
        rows = share(parameter, mesh)
        # otherwise transformers would initialize what it has read
        rows._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]
        return rows

    hook = register_module_parameter_registration_hook(shared)
    try:
        with warnings.catch_warnings():
            # of parameters on the meta device, which are initialized without an effect
            warnings.filterwarnings("ignore", "DTensor random operators")
            yield
    finally:
        hook.remove()


def _leaves_out_processes(shape: torch.Size, world: int) -> bool:
    """Return whether some of the processes have no expert of a stack of that shape."""
    return len(shape) == 3 and -(-shape[0] // world) * (world - 1) >= shape[0]
