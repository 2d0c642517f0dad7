"""CUDA's code paths without a GPU: tensors without values that say they are on one, and what is
called on the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """names: of the operators called. dtypes: of the operands of matrix products."""

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
    """Within this context `device="cuda"` makes such tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
        yield calls
