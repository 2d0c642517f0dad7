"""What the routers of a mixture of experts said, for losses and records. Axes: N tokens, E
experts.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from qarl.quant.runtime.replaced import replaced


class RouterLog:
    """Logits of a model's routers in its last forward, [N, E] a layer, in order. enabled: whether
    they are kept.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.logits: list[torch.Tensor] = []
        self._open = False

    def watch(self, routers: Iterable[nn.Module]) -> None:
        """Take what these modules return."""

        def take(
            router: nn.Module,
            inputs: object,
            output: torch.Tensor | tuple[torch.Tensor, ...],
        ) -> None:
            self.take(output if isinstance(output, torch.Tensor) else output[0])

        for router in routers:
            router.register_forward_hook(take)

    def enable(self, enabled: bool) -> None:
        """Keep logits from the next forward on, or do not."""
        self.enabled = enabled

    def one_forward(self) -> AbstractContextManager[None]:
        """Drop what is held, and take what routers return within this context: in the backward, a
        checkpointed layer comes by its router again.
        """
        self.logits.clear()
        return replaced(self, _open=self.enabled)

    def take(self, logits: torch.Tensor) -> None:
        """Of one router, [N, E]."""
        if self._open:
            self.logits.append(logits)
