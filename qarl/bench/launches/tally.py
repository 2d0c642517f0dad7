"""Counting what a GPU would be asked to do, on tensors of torch's device "meta", which have shapes and no values.

Where values decide what comes next, they are needed after all: those that came from the host (tokens, lengths, masks,
advantages) are kept there beside the tensors, and computed along. What is not known is finite, and true; which experts
a router chooses is not known either: all equally often, in turn.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
"""Neither read nor write."""

_LOOKUPS = {"embedding", "index", "index_select", "gather", "index_add_", "index_put_", "_index_put_impl_", "scatter_"}
"""Touch of one operand as much as of another, not all of it."""

_WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal", "repeat_interleave"}
"""Ask the device for the size of their result, or for the result."""


_SMALL = 1 << 20
"""Elements of a tensor whose values are kept."""


class Tally(TorchDispatchMode):
    """Within this context: launches, of operators that compute or copy on the device, each at least a kernel; bytes,
    that these read and write; waits, of the host for the device; operators: launches by name."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = self.waits = 0
        self.operators: Counter[str] = Counter()
        self._inside = 0
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def reset(self) -> None:
        """Begin anew."""
        self.launches = self.bytes = self.waits = 0
        self.operators.clear()

    def one_kernel(self, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """The function as one launch that reads its tensors once and writes its results once."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                results = function(*args, **kwargs)
            finally:
                self._inside -= 1
            touched = [t for t in tree_leaves((args, kwargs, results)) if on_device(t)]
            if touched:
                self.launch(name or function.__name__, sum(t.nbytes for t in touched))
            return results

        return call

    def launch(self, name: str, count: int) -> None:
        """Add one, of `count` bytes."""
        if not self._inside:
            self.launches += 1
            self.bytes += count
            self.operators[name] += 1

    def wait(self) -> None:
        """Add one."""
        if not self._inside:
            self.waits += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        device = kwargs.get("device")
        if not any(map(on_device, tensors)):
            if device is None or torch.device(device).type != "meta":
                return func(*args, **kwargs)
            return self._from_host(func, name, tensors, args, kwargs)
        if name == "_local_scalar_dense":
            self.wait()
            return self._number(tensors[0])
        target = tensors[0].device if device is None else torch.device(device)
        if name in ("_to_copy", "copy_") and target.type == "cpu":
            return self._to_host(func, name, args, kwargs)
        result = self._computed(func, name, args, kwargs)
        if not func.is_view and name not in _ALLOCATIONS:
            self.launch(name, _touched(name, tensors, result))
        return result

    def _from_host(self, func: Any, name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """A tensor made on the device, or copied to it."""
        result = func(*args, **kwargs)
        if tensors:  # of pageable memory: the host waits until it is there
            self.wait()
        if name in _ALLOCATIONS:
            return result
        self.launch(name, result.nbytes)
        if _is_small(result):
            self._values[result] = func(*args, **{**kwargs, "device": torch.device("cpu")})
        return result

    def _to_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        self.wait()
        source = args[1] if name == "copy_" else args[0]
        self.launch(name, source.nbytes)
        there = self._values.get(source)
        there = torch.full(source.shape, source.dtype == torch.bool, dtype=source.dtype) if there is None else there
        return func(args[0], there) if name == "copy_" else func(there, *args[1:], **kwargs)

    def _number(self, tensor: torch.Tensor) -> Any:
        there = self._values.get(tensor)
        if there is not None:
            return there.item()
        return True if tensor.dtype == torch.bool else 1 if not tensor.is_floating_point() else 1.0

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The operator's result, with values where those are known."""
        by_mask = name in ("index", "index_put_", "_index_put_impl_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name in _WAITS or by_mask:
            self.wait()
        known = self._on_host(func, name, args, kwargs)
        if name in _WAITS or (by_mask and name == "index"):
            return self._of_known_size(func, name, args, kwargs, known)
        if by_mask:  # writes into its first argument, whose shape is known
            return args[0]
        result = func(*args, **kwargs)
        for one, there in zip(tree_leaves(result), tree_leaves(known), strict=False):
            if isinstance(there, torch.Tensor) and on_device(one) and _is_small(one):
                self._values[one] = there
        if name in ("topk", "sort"):
            self._choose(result[1], args[0].shape[-1])
        return result

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The operator's result on the host, of tensors that are all known there."""
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and on_device(t)]
        if any(self._values.get(t) is None for t in leaves) or "empty" in name:
            return None

        def there(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._values[value] if on_device(value) else value
            return torch.device("cpu") if isinstance(value, torch.device) else value

        return func(*tree_map(there, args), **tree_map(there, kwargs))

    def _of_known_size(self, func: Any, name: str, args: Any, kwargs: Any, known: Any) -> Any:
        if known is None and name == "index":  # floating-point rows by a known mask
            masks = [None if i is None else self._values[i] for i in args[1]]
            known = aten.index(torch.empty_strided(args[0].shape, (0,) * args[0].ndim, dtype=args[0].dtype), masks)
        assert known is not None, f"{name} of values that are not known"
        if isinstance(known, bool):
            return known
        result = tree_map(lambda t: torch.empty_like(t, device="meta"), known)
        for one, there in zip(tree_leaves(result), tree_leaves(known), strict=True):
            if _is_small(one):
                self._values[one] = there
        return result

    def _choose(self, index: torch.Tensor, count: int) -> None:
        """Let the K best of `count` be each of them in turn."""
        if self._values.get(index) is None:
            self._values[index] = torch.arange(index.numel()).remainder(count).view(index.shape).to(index.dtype)


def on_device(value: Any) -> bool:
    """Whether it is a tensor of the GPU, or the device that stands for it."""
    device = value.device if isinstance(value, torch.Tensor) else value
    return isinstance(device, torch.device) and device.type == "meta"


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _SMALL


def _touched(name: str, tensors: list[torch.Tensor], result: Any) -> int:
    written = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    if name in _LOOKUPS:
        small = sorted(t.nbytes for t in {id(t): t for t in (*tensors, *written)}.values())
        return sum(small[:-1]) + (small[-2] if len(small) > 1 else 0)
    return sum(t.nbytes for t in (*tensors, *written))
