"""A sparse mixture-of-experts block routed as the engine routes it.

transformers takes a softmax over all experts in fp32, picks the K best, renormalizes them and rounds their weights to
the compute dtype; vLLM picks the K best logits and takes a softmax over those, on CPUs in the compute dtype, on GPUs in
fp32. Equal on paper, not in the last bits, and a token that goes to another expert is off by more than bits. The router
itself stays in full precision: it is a linear layer no scheme quantizes.

Axes: B sequences, T tokens, N = B·T, K experts a token, E experts, H hidden columns.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from qarl.configs.errors import InputError
from qarl.quant.operators import rounding
from qarl.quant.runtime.libraries import has_vllm
from qarl.quant.runtime.shards import whole_shape


class OperatorError(InputError):
    """Engine operators were asked for a model they are not written for."""

    heading = "operators"


class EngineMoeBlock(nn.Module):
    """Router and experts of one layer, for models that route by softmax over the logits.

    decoder_layer: number of the layer. renormalize: whether a token's K weights sum to one. replayed: experts to use
    instead of the K best, integer [N, K], -1 where the K best are; their weights still come from this model's logits.
    """

    def __init__(self, block: nn.Module, decoder_layer: int, renormalize: bool):
        super().__init__()
        router = block.get_submodule("gate")
        self.gate: nn.Module = _linear(router.weight)  # type: ignore[arg-type]
        self.experts: nn.Module = block.get_submodule("experts")
        self.top_k: int = router.top_k  # type: ignore[assignment]
        self.decoder_layer = decoder_layer
        self.renormalize = renormalize
        self.replayed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [B, T, H] → the same."""
        flat = x.reshape(-1, x.shape[-1])
        weights, index = route(self.gate(flat), self.top_k, self.renormalize, self.replayed)
        return self.experts(flat, index, weights).view(x.shape)


def route(
    logits: torch.Tensor, top_k: int, renormalize: bool, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: compute dtype [N, E] → weights fp32 [N, K] and experts int64 [N, K].

    chosen: integer [N, K], experts that were picked elsewhere; -1, or None for all, picks the K largest logits.
    Source: vLLM `CPURouter`, and `topk_softmax` on CUDA, which is asked itself.
    """
    best = None
    if rounding.rounds_as_cuda(logits):
        best, index = _best_on_cuda(logits.detach(), top_k, renormalize)
        logits = logits.to(torch.float32)
    else:  # in the compute dtype and unsorted, as vLLM asks on CPUs: among equal logits the same experts win
        index = logits.topk(top_k, dim=-1, sorted=False).indices
    if chosen is not None:
        index = torch.where(chosen < 0, index, chosen.to(index.dtype))
    picked = logits.gather(-1, index)
    weights = picked.softmax(-1) if renormalize else (picked - logits.logsumexp(-1, keepdim=True)).exp()
    if best is not None and chosen is None:
        weights = weights + (best - weights).detach()  # the engine's own bits, with this gradient
    return weights.to(torch.float32), index


def _best_on_cuda(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 [N, K] and experts int64 [N, K] by vLLM's operator; by torch's where there is none, the lower number
    among equal logits."""
    if logits.is_cuda and has_vllm():
        from qarl.quant.kernels.vllm_operators import top_experts

        return top_experts(logits, top_k, renormalize)
    weights, index = logits.to(torch.float32).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, index = weights[:, :top_k], index[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), index


def replay_experts(model: nn.Module, experts: torch.Tensor | None) -> None:
    """Let the next forwards route to given experts, or by their own routers where there are none.

    experts: integer [B, T, L, K] over decoder layers L, -1 where the router is to choose. Raises `OperatorError` for a
    model without `EngineMoeBlock`s.
    """
    blocks = [module for module in model.modules() if isinstance(module, EngineMoeBlock)]
    if experts is not None and not blocks:
        raise OperatorError(
            "the engine's expert choices can be replayed by the engine's operators alone, which this model does "
            "not run with; set rollout.router_replay false, or learner.operators 'engine' where the model allows"
        )
    for block in blocks:
        block.replayed = None if experts is None else experts[:, :, block.decoder_layer].flatten(0, 1)


class RouterLog:
    """Logits of a model's routers in its last forward, [N, E] a layer, in order. enabled: whether they are kept."""

    def __init__(self, routers: Iterable[nn.Module]):
        self.enabled = False
        self.logits: list[torch.Tensor] = []
        self._open = False
        for router in routers:
            router.register_forward_hook(self._take)

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

    def _take(self, router: nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        if self._open:
            self.logits.append(output if isinstance(output, torch.Tensor) else output[0])


def _linear(weight: nn.Parameter) -> nn.Linear:
    with torch.device("meta"):
        rows, columns = whole_shape(weight)
        linear = nn.Linear(columns, rows, bias=False)
    linear.weight = weight
    return linear
