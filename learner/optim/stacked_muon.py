"""torch's Muon over many matrices of one shape, such as a layer's experts: one product for all of them on a GPU."""

from typing import Any

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz  # torch has no public name for either

_ELEMENTS = 1 << 26
"""That are orthogonalized at once: 128 MiB in bfloat16, and three times that in between."""


class StackedMuon(torch.optim.Muon):
    """Values, settings and state are those of torch's Muon but for the last bits of products in bfloat16.

    params: fp32 [R, C] each, all of one shape, with a gradient each or none.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See `torch.optim.Muon.step`."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(parameters, group)

    def _step(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        foreach: Any = torch  # whose functions over many tensors have no public names
        gradients = [p.grad for p in parameters]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        foreach._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        lr, count = group["lr"], max(1, _ELEMENTS // parameters[0].numel())
        foreach._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        step = -_adjust_lr(lr, group["adjust_lr_fn"], parameters[0].shape)
        for start in range(0, len(parameters), count):
            part = slice(start, start + count)
            updates = momenta[part]
            if group["nesterov"]:
                updates = foreach._foreach_lerp(gradients[part], momenta[part], group["momentum"])
            whole = torch.stack([*updates]).bfloat16()
            settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
            directions = torch.vmap(_zeropower_via_newtonschulz, in_dims=(0, None, None, None))(whole, *settings)
            foreach._foreach_add_(parameters[part], [*directions.to(torch.float32).unbind()], alpha=step)
