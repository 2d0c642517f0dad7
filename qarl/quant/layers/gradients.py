"""How the gradients of one model's masters are made: their scale, their precision, and where they
are added up.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qarl.quant.runtime.compile import compiled
from qarl.quant.runtime.cpu_blocks import row_blocks
from qarl.quant.runtime.shards import shard_of, whole_shape

AHEAD = 1 << 25
"""Elements of gradients that may be on their way to other processes beyond the largest gradient of
one layer.
"""


class Gradients:
    """One object a model, which everything with a backward of its own asks.

    scale: what the loss was multiplied with (`learner.optim.loss_scale.LossScale`). Every gradient
    of a master is divided by it where it is made, in fp32. So masters never see scaled gradients,
    whoever accumulates, reduces and clips them. in_place: weight gradients are added to
    `master.grad` where they are made. Autograd, which they otherwise go through, needs each once
    more before it adds it up; who relies on its hooks leaves this off. fp32_input_grad: gradients
    of a product's input are computed in fp32 (see `quant.layers.straight_through.input_gradient`).
    reduce_dtype: in which processes that have parts of a master send each other the other parts'
    gradients. compiled: passes over rows go through torch.compile, which makes one of what torch's
    operators do in several.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self.in_place = False
        self.fp32_input_grad = True
        self.reduce_dtype = torch.float32
        self.compiled = False
        self._under_way: deque[tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]] = (
            deque()
        )
        self._largest = 0
        self._added_up: dict[torch.Tensor, torch.Tensor] | None = None

    def configure(
        self,
        *,
        in_place: bool | None = None,
        fp32_input_grad: bool | None = None,
        reduce_dtype: torch.dtype | None = None,
        compiled: bool | None = None,
    ) -> None:
        """Set these for good; None leaves one as it is."""
        self.in_place = self.in_place if in_place is None else in_place
        self.fp32_input_grad = self.fp32_input_grad if fp32_input_grad is None else fp32_input_grad
        self.reduce_dtype = reduce_dtype or self.reduce_dtype
        self.compiled = self.compiled if compiled is None else compiled

    def scale_by(self, scale: float) -> None:
        """Of the losses to come."""
        self.scale = scale

    def into(self, master: torch.Tensor) -> torch.Tensor | None:
        """The fp32 gradient of a master to add to, zeros at first; None where autograd is to
        deliver it: unless `in_place`, and to a master with hooks, which would not see it. Of a
        master of which processes have parts, the whole one, after `add_up`.
        """
        if self._added_up is not None and shard_of(master) is not None:
            if master not in self._added_up:
                self.make_way(master)
                self._added_up[master] = torch.zeros(whole_shape(master), device=master.device)
            return self._added_up[master]
        if not self.in_place or master._backward_hooks or master._post_accumulate_grad_hooks:
            return None
        if master.grad is None:
            master.grad = torch.zeros_like(master, dtype=torch.float32, requires_grad=False)
        return master.grad

    def delivered(self, master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """What autograd is given for a master: its fp32 gradient; or None where processes have
        parts of the master. Each then adds its part of their sum to what it has, by the end of the
        backward, and the whole, overwritten, is let go of: sums of a layer are under way while the
        next is computed.
        """
        shard = shard_of(master)
        if shard is None:
            return gradient
        torch.autograd.Variable._execution_engine.queue_callback(self._arrive)
        self._under_way.append((master, gradient, shard.reduce(gradient, self.reduce_dtype)))
        return None

    def make_way(self, *masters: torch.Tensor) -> None:
        """Before whole gradients of these are made: wait for sums until those under way leave
        memory for them.
        """
        needed = sum(whole_shape(master).numel() for master in masters)
        self._largest = max(self._largest, needed)
        self._arrive(self._largest + AHEAD - needed)

    def _arrive(self, left: int = 0) -> None:
        """Wait for sums, the first first, until no more than so many elements are under way."""
        while sum(whole.numel() for _, whole, _ in self._under_way) > left:
            master, _, total = self._under_way.popleft()
            part = total()
            if master.grad is None:
                master.grad = part.clone()
            else:
                master.grad += part

    def add_up(self, until: torch.Tensor) -> None:
        """From here on in the backward, add up gradients of masters that processes have parts of in
        this process, and sum them over the processes once that of `until` is there: what it is
        multiplied with part by part.
        """
        self._added_up = {}
        until.register_hook(self._deliver_sums)

    def _deliver_sums(self, _: torch.Tensor) -> None:
        sums, self._added_up = self._added_up or {}, None
        for master, gradient in sums.items():
            self.delivered(master, gradient)

    def over_rows(
        self, body: Callable[..., Any], rows: Sequence[torch.Tensor], *whole: Any
    ) -> list[Any]:
        """body(*rows, *whole), which writes into the first of `rows`, tensors of equally many rows;
        on CPUs a block of rows at a time. whole: what it is given besides. Returns the results.
        """
        body = compiled(body) if self.compiled else body
        return [body(*part, *whole) for part in row_blocks(*rows)]

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """gradient: fp32, overwritten without the scale and returned; autograd casts it to a
        master's `grad_dtype`.
        """
        return gradient if self.scale == 1.0 else gradient.mul_(1.0 / self.scale)


def add_rows(total: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Add rows, fp32 [n, …], to those of `total`, fp32 [N, …], at `places`, int64 [n]; returns
    `total`. In one order for any number of threads: CPUs add by atomics in `index_put_`, GPUs in
    `index_add_`.
    """
    return (
        total.index_put_((places,), rows, accumulate=True)
        if total.is_cuda
        else total.index_add_(0, places, rows)
    )
