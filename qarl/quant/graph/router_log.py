"""The logits of routers in a mixture of experts, for losses and records.

Axes: N tokens, E experts.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from qarl.quant.runtime.replaced import replaced


class RouterLog:
    """Logits of a model's routers in its last forward."""

    def __init__(self) -> None:
        self.enabled = False
        """If True, logits are kept."""
        self.logits: list[torch.Tensor] = []
        """[N, E] of each layer, in order."""
        self._open = False

    def watch(self, routers: Iterable[nn.Module]) -> None:
        """Record the outputs of these modules."""

        def take(
            router: nn.Module,
            inputs: object,
            output: torch.Tensor | tuple[torch.Tensor, ...],
        ) -> None:
            self.take(output if isinstance(output, torch.Tensor) else output[0])

        for router in routers:
            router.register_forward_hook(take)

    def enable(self, enabled: bool) -> None:
        """Set whether logits are kept from the next forward on."""
        self.enabled = enabled

    def one_forward(self) -> AbstractContextManager[None]:
        """Clear the logits, and return a context within which routers' outputs are recorded.

        Outside of it nothing is recorded, because in the backward a checkpointed layer runs its
        router again.
        """
        self.logits.clear()
        return replaced(self, _open=self.enabled)

    def take(self, logits: torch.Tensor) -> None:
        """Record the logits of one router, [N, E]."""
        if self._open:
            self.logits.append(logits)
