"""A simulation of one micro-batch of a learner that shares its masters with other processes.

Products, and sums and gathers over the processes, run on two streams. As in the learner,

- the sums of a layer's gradients begin when the layer's backward is over, and run while the next
  layer is computed;
- they come one after another, and those in flight are bounded
  (`quant.layers.gradients.Gradients.wait_for_memory`): a layer begins its backward when its
  gradients fit beside the others;
- gathered codes and a base that comes from the host are waited for where they are used, and a
  gather comes after the sums that were started before it;
- the backward ends when the last sum does.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One layer, or the output head."""

    forward: float
    """Seconds of the forward's products."""

    backward: float
    """Seconds of the backward's products, with those that are computed again."""

    gradients: int
    """Elements of the gradients that are summed over the processes."""

    sums: float
    """Seconds that sending them takes."""

    forward_gather: float = 0.0
    """Seconds in which the forward waits for gathered codes."""

    backward_gather: float = 0.0
    """Seconds in which the backward sends for gathered codes."""

    forward_fetch: float = 0.0
    """Seconds in which a base comes from the host for the forward."""

    backward_fetch: float = 0.0
    """The same for the backward."""


def micro_batch_seconds(layers: Sequence[Layer], in_flight: int) -> float:
    """Return the seconds of a forward and backward through layers, in the forward's order.

    in_flight: elements of gradients that may be in flight beside the largest layer's.
    """
    now = sum(layer.forward_gather + layer.forward_fetch + layer.forward for layer in layers)
    bound = max(layer.gradients for layer in layers) + in_flight
    sent = now
    """When everything that was given to the other stream is over."""
    sums: deque[tuple[int, float]] = deque()
    for layer in reversed(layers):
        while sum(gradients for gradients, _ in sums) + layer.gradients > bound:
            _, end = sums.popleft()
            now = max(now, end)
        if layer.backward_gather:
            sent = max(now, sent) + layer.backward_gather
            now = sent
        now += layer.backward_fetch + layer.backward
        if layer.gradients:
            sent = max(now, sent) + layer.sums
            sums.append((layer.gradients, sent))
    return max(now, sent)
