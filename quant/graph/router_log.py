"""What the routers of a mixture of experts said, for losses and records. Axes: N tokens, E experts."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


class RouterLog:
    """Logits of a model's routers in its last forward, [N, E] a layer, in order. enabled: whether they are kept."""

    def __init__(self) -> None:
        self.enabled = False
        self.logits: list[torch.Tensor] = []
        self._open = False

    def watch(self, routers: Iterable[nn.Module]) -> None:
        """Take what these modules return."""

        def take(router: nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            self.take(output if isinstance(output, torch.Tensor) else output[0])

        for router in routers:
            router.register_forward_hook(take)

    def enable(self, enabled: bool) -> None:
        """Keep logits from the next forward on, or do not."""
        self.enabled = enabled

    @contextlib.contextmanager
    def one_forward(self) -> Iterator[None]:
        """Drop what is held, and take what routers return within this context: in the backward, a checkpointed layer
        comes by its router again."""
        self.logits.clear()
        self._open = self.enabled
        try:
            yield
        finally:
            self._open = False

    def take(self, logits: torch.Tensor) -> None:
        """Of one router, [N, E]."""
        if self._open:
            self.logits.append(logits)
