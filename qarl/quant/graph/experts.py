"""Routed experts in the graph: the leaf of vLLM's `MoERunner`, which routes, multiplies, and adds
shared experts.

The router is the engine's own. On CPUs it is torch's operators, which autograd goes through; on
CUDA a kernel, whose weights get the gradient of the same formula. Experts that were chosen
elsewhere get this model's weights by it, too.

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
    """The experts of one decoder layer. runner: vLLM's, whose entry this takes. experts: whose
    codes are multiplied. log: takes the router's logits. number: of the decoder layer. replayed:
    experts to use instead of the router's choice, integer [N, K], -1 where that stands; None:
    everywhere.
    """

    def __init__(self, runner: MoERunner, experts: RoutedLowBitExperts, log: RouterLog):
        self._runner: Any = runner
        self._experts, self._log = experts, log
        self.number: int = self._runner.layer_id
        self.replayed: Tensor | None = None
        self._runner._forward_entry = self

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        shared_input: Tensor | None,
        tokens: Tensor | None,
        *unused: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """hidden: compute dtype [N, H]; logits: [N, E], unless the runner holds the router;
        shared_input: of the shared experts, if there are any; tokens: int64 [N], for routers that
        ask. Returns the routed experts' output, after the shared experts' where there are any.
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
        """Weights fp32 [N, K] and experts integer [N, K]."""
        router = self._runner.router
        if self.replayed is None and not logits.is_cuda:
            return router._select_experts(hidden, logits, input_ids=tokens)
        with torch.no_grad():
            best, index = router._select_experts(hidden, logits, input_ids=tokens)
        if self.replayed is not None:
            index = torch.where(self.replayed < 0, index, self.replayed.to(index.dtype))
        weights = weights_of(router, logits, index)
        if self.replayed is None:
            # the engine's own bits, with this gradient
            weights = weights + (best - weights).detach()
        return weights, index


def weights_of(router: Any, logits: Tensor, index: Tensor) -> Tensor:
    """The router's weights of given experts, fp32 [N, K]. logits: [N, E]; index: integer [N, K].

    Source: vLLM 0.32's `CPURouter`; its kernels on CUDA compute the same in fp32. Raises
    `GraphError` for a router with a function of its own.
    """
    if getattr(router, "custom_routing_function", None) is not None:
        raise GraphError(
            f"{type(router).__name__} routes by a function of its model's, which gives no weights"
            " for experts that the engine chose, nor a gradient on CUDA; set rollout.router_replay"
            " false, or learn on a CPU"
        )
    scoring, renormalize = (
        getattr(router, "scoring_func", "softmax"),
        router.renormalize,
    )
    # On CUDA the routers of groups and of corrected scores, and no others, have the factor.
    grouped = getattr(router, "use_grouped_topk", hasattr(router, "routed_scaling_factor"))
    logits = logits.float() if grouped or logits.is_cuda else logits
    index = index.long()
    if scoring == "softmax" and not grouped:
        picked = logits.gather(-1, index)
        weights = (
            picked.softmax(-1)
            if renormalize
            else (picked - logits.logsumexp(-1, keepdim=True)).exp()
        )
        return weights.float()
    weights = (logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)).gather(-1, index)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    return weights * getattr(router, "routed_scaling_factor", 1.0)
