"""Routed experts in the graph: the leaf of vLLM's `MoERunner`.

It routes, multiplies, and adds shared experts. The router is the engine's own. On CPUs it consists
of torch's operators, which autograd follows. On CUDA it is a kernel, whose weights get the gradient
of the same formula. That formula also gives this model's weights for experts that were chosen
elsewhere.

Axes: N tokens, K experts a token, E experts, H hidden columns.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from qarl.configs.errors import GraphError
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.layers.experts import RoutedLowBitExperts


class RoutedLayer:
    """The routed experts of one decoder layer.

    Args:
        runner: vLLM's runner, whose entry point this object replaces.
        experts: low-bit experts that multiply.
        log: receives the router's logits.
    """

    def __init__(self, runner: MoERunner, experts: RoutedLowBitExperts, log: RouterLog):
        self._runner: Any = runner
        self._experts = experts
        self._log = log
        self.number: int = self._runner.layer_id
        """Number of the decoder layer."""
        self.replayed: Tensor | None = None
        """Experts to use instead of the router's choice, integer [N, K]; -1 where the router
        chooses. None: it chooses everywhere.
        """
        self._runner._forward_entry = self

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        shared_input: Tensor | None,
        tokens: Tensor | None,
        *unused: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the routed experts' output, or (shared, routed) if there are shared experts.

        Args:
            hidden: compute dtype [N, H].
            logits: [N, E]; ignored if the runner holds the router.
            shared_input: input of the shared experts, if there are any.
            tokens: int64 [N], for routers that read token ids.
            unused: further arguments of vLLM's entry point.
        """
        shared = self._runner._shared_experts
        shared = None if shared is None else shared._layer(shared_input)
        if self._runner.gate is not None:
            logits, _ = self._runner.gate(hidden)
        self._log.take(logits)
        weights, index = self._route(hidden, logits, tokens)
        routed = self._experts(hidden, index, weights)
        return routed if shared is None else (shared, routed)

    def _route(
        self, hidden: Tensor, logits: Tensor, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return routing weights, fp32 [N, K], and expert numbers, integer [N, K]."""
        router = self._runner.router
        if self.replayed is None and not logits.is_cuda:
            return router._select_experts(hidden, logits, input_ids=tokens)
        with torch.no_grad():
            best, index = router._select_experts(hidden, logits, input_ids=tokens)
        if self.replayed is not None:
            index = torch.where(self.replayed < 0, index, self.replayed.to(index.dtype))
        weights = weights_of(router, logits, index)
        if self.replayed is None:
            # the value has the engine's own bits, the gradient is that of `weights_of`
            weights = weights + (best - weights).detach()
        return weights, index


def weights_of(router: Any, logits: Tensor, index: Tensor) -> Tensor:
    """Return the router's weights for given experts, fp32 [N, K].

    logits: [N, E]. index: integer [N, K].

    Source: vLLM 0.32's `CPURouter`; its kernels on CUDA compute the same in fp32. Raises
    `GraphError` for a router with a routing function of its own.
    """
    if getattr(router, "custom_routing_function", None) is not None:
        raise GraphError(
            f"{type(router).__name__} routes by a function of its model's, which gives no weights"
            " for experts that the engine chose, nor a gradient on CUDA; set rollout.router_replay"
            " false, or learn on a CPU"
        )
    scoring = getattr(router, "scoring_func", "softmax")
    renormalize = router.renormalize
    # On CUDA only routers that choose groups or correct scores have a scaling factor.
    grouped = getattr(router, "use_grouped_topk", hasattr(router, "routed_scaling_factor"))
    logits = logits.float() if grouped or logits.is_cuda else logits
    index = index.long()
    if scoring == "softmax" and not grouped:
        picked = logits.gather(-1, index)
        if renormalize:
            weights = picked.softmax(-1)
        else:
            weights = (picked - logits.logsumexp(-1, keepdim=True)).exp()
        return weights.float()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(-1, index)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)
