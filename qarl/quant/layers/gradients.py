"""The computation of the gradients of one model's masters: scale, precision and accumulation."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from qarl.quant.limits import GRADIENTS_IN_FLIGHT
from qarl.quant.runtime.compile import compiled
from qarl.quant.runtime.cpu_blocks import row_blocks
from qarl.quant.runtime.shards import own_rows, shard_of, shared_like


class _Reduction(NamedTuple):
    """A sum over the processes that is in flight."""

    master: torch.Tensor
    """Sharded master."""
    whole: torch.Tensor
    """This process's gradient of the whole master, a buffer of the sum."""
    wait: Callable[[], torch.Tensor]
    """Waits for the sum and returns this process's rows of it."""


class Gradients:
    """Settings and accumulators of one model's gradients, used by every custom backward."""

    def __init__(self) -> None:
        self.scale = 1.0
        """Factor by which the loss was multiplied (`learner.optim.loss_scale.LossScale`). Every
        gradient of a master is divided by it in fp32 where it is computed, so masters never see
        scaled gradients, whoever accumulates, reduces and clips them.
        """
        self.in_place = False
        """If True, weight gradients are added to `master.grad` where they are computed. Otherwise
        autograd allocates each gradient a second time before accumulating it. Leave it off if
        you rely on autograd hooks.
        """
        self.fp32_input_grad = True
        """If True, gradients of a product's input are computed in fp32 (see
        `quant.layers.straight_through.input_gradient`).
        """
        self.reduce_dtype = torch.float32
        """Dtype in which processes that share a sharded master send each other their parts of the
        gradient.
        """
        self.compiled = False
        """If True, passes over rows go through torch.compile, which fuses several of torch's
        operators into one pass.
        """
        self._in_flight: deque[_Reduction] = deque()
        self._largest = 0
        """Number of elements of one layer's largest gradients so far."""
        self._deferred: dict[torch.Tensor, torch.Tensor] | None = None
        """Master → gradient summed in this process, from `defer_reductions` until its hook; else
        None.
        """

    def configure(
        self,
        *,
        in_place: bool | None = None,
        fp32_input_grad: bool | None = None,
        reduce_dtype: torch.dtype | None = None,
        compiled: bool | None = None,
    ) -> None:
        """Change the settings that are given; None leaves a setting unchanged."""
        self.in_place = self.in_place if in_place is None else in_place
        self.fp32_input_grad = self.fp32_input_grad if fp32_input_grad is None else fp32_input_grad
        self.reduce_dtype = reduce_dtype or self.reduce_dtype
        self.compiled = self.compiled if compiled is None else compiled

    def scale_by(self, scale: float) -> None:
        """Set the factor by which later losses are multiplied."""
        self.scale = scale

    def accumulator(self, master: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 tensor in which a master's gradient accumulates, initially zeros.

        Return None if autograd must deliver the gradient: unless `in_place`, and for a master with
        hooks, which would otherwise not see it. After `defer_reductions`, return the whole tensor's
        gradient for a sharded master.
        """
        if self._deferred is not None and shard_of(master) is not None:
            if master not in self._deferred:
                self.wait_for_memory(master)
                self._deferred[master] = torch.zeros(master.shape, device=master.device)
            return self._deferred[master]
        if not self.in_place or master._backward_hooks or master._post_accumulate_grad_hooks:
            return None
        if master.grad is None:
            master.grad = torch.zeros_like(master, dtype=torch.float32, requires_grad=False)
        return master.grad

    def start_reduction(self, master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 gradient that autograd is given for a master; None for a sharded one.

        For a sharded master, summing over the processes starts here and `gradient` is overwritten.
        By the end of the backward each process has added its part of the sum to its `grad`, and the
        whole gradient has been freed. Sums of one layer are in flight while the next layer is
        computed.
        """
        shard = shard_of(master)
        if shard is None:
            return gradient
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_reductions)
        wait = shard.reduce(gradient, self.reduce_dtype)
        self._in_flight.append(_Reduction(master, gradient, wait))
        return None

    def wait_for_memory(self, *masters: torch.Tensor) -> None:
        """Wait for sums in flight until whole gradients of these masters fit beside the others.

        The upper bound on elements in flight is the largest layer plus `GRADIENTS_IN_FLIGHT`.
        """
        needed = sum(master.numel() for master in masters)
        self._largest = max(self._largest, needed)
        self._finish_reductions(self._largest + GRADIENTS_IN_FLIGHT - needed)

    def _finish_reductions(self, left: int = 0) -> None:
        """Wait for sums, oldest first, until at most `left` elements are in flight."""
        while sum(reduction.whole.numel() for reduction in self._in_flight) > left:
            oldest = self._in_flight.popleft()
            rows = oldest.wait()
            if oldest.master.grad is None:
                oldest.master.grad = shared_like(rows.clone(), oldest.master)
            else:
                own_rows(oldest.master.grad).add_(rows)

    def defer_reductions(self, until: torch.Tensor) -> None:
        """Accumulate gradients of sharded masters in this process first.

        They are summed over the processes when the backward reaches `until`. So a master that is
        multiplied in several parts (the output head, chunk by chunk) is reduced once.
        """
        self._deferred = {}
        until.register_hook(self._start_deferred)

    def _start_deferred(self, _: torch.Tensor) -> None:
        """Start the reductions that were deferred: a hook of the tensor `until`."""
        deferred = self._deferred or {}
        self._deferred = None
        for master, gradient in deferred.items():
            self.start_reduction(master, gradient)

    def over_rows(
        self, body: Callable[..., Any], rows: Sequence[torch.Tensor], *whole: Any
    ) -> list[Any]:
        """Return the results of body(*rows, *whole), on CPUs for one block of rows at a time.

        Args:
            body: writes into the first of `rows`.
            rows: tensors with the same number of rows.
            whole: arguments that are not split.
        """
        body = compiled(body) if self.compiled else body
        return [body(*part, *whole) for part in row_blocks(*rows)]

    def unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divide a fp32 gradient by the loss scale, in place, and return it.

        Autograd casts it to a master's `grad_dtype`.
        """
        return gradient if self.scale == 1.0 else gradient.mul_(1.0 / self.scale)


def add_rows(
    total: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Add `rows`, fp32 [n, …], to the rows of `total`, fp32 [N, …], at `places`, int64 [n].

    Returns `total`. The order of additions is the same for any number of threads, which decides the
    operator: `index_put_` adds by atomics on CPUs, and `index_add_` does on GPUs.
    """
    return (
        total.index_put_((places,), rows, accumulate=True)
        if total.is_cuda
        else total.index_add_(0, places, rows)
    )
