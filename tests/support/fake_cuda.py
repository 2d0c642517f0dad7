"""CUDA's code paths without a GPU: tensors without values that claim to be on one, and a record of
the operators called.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Record of the operators called (`names`) and of the dtypes of operands of matrix products
    (`dtypes`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.names.append(name)
        if "mm" in name:
            self.dtypes |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda() -> Iterator[Calls]:
    """Within this context, let `device="cuda"` make such tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
        yield calls
