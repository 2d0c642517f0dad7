"""How parameters outside linear layers and experts reach their masters.

The forward reads a compute-dtype copy, which is also what is published unless the learner computes
in a dtype of its own (`learner.compute_dtype`); the gradient goes to the master by autograd, in
fp32 until it is there. Axes: V vocabulary, H hidden columns.
"""

from typing import Any

import torch
from torch import nn

from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.gradients import Gradients, add_rows
from qarl.quant.runtime.shards import fill, shard_of, whole_shape


class MasterCopy:
    """A parameter outside linear layers and experts: its master, and the copies that engine and
    learner read. published: in the engine's dtype. computed: in the learner's; where that is the
    same, one tensor. Both are to be filled.
    """

    def __init__(self, master: torch.Tensor, context: LayerContext):
        dtype, compute_dtype = context.dtype, context.compute_dtype
        self.master = master
        self.published = _empty_copy(master, dtype)
        self.computed = (
            self.published if compute_dtype == dtype else _empty_copy(master, compute_dtype)
        )
        self.context = context

    @property
    def read(self) -> torch.Tensor:
        """What the forward takes."""
        return self.published if self.context.forward_dtype == self.context.dtype else self.computed

    def refresh(self) -> None:
        """Take over the master's present values."""
        fill(self.published, self.master, shard_of(self.master))
        if self.computed is not self.published:
            fill(self.computed, self.master, shard_of(self.master))

    def routed(self) -> torch.Tensor:
        """What the forward takes, with a way back to the master."""
        return _Route.apply(self.master, self.read, self.context.gradients)

    def looked_up(self, tokens: torch.Tensor, padding: int = -1) -> torch.Tensor:
        """Rows of what the forward takes: compute dtype [..., H] for int64 tokens of any shape. The
        backward sums rows in fp32, without a compute-dtype gradient [V, H] in between. padding: a
        token whose row is not learned.
        """
        return _Lookup.apply(tokens, self.master, self, padding)


class ComputeCopy(nn.Module):
    """A torch parametrization: reading the parameter gives the copy, with a way back to the
    master.
    """

    def __init__(self, copy: MasterCopy):
        super().__init__()
        self._copy = copy

    def forward(self, master: torch.Tensor) -> torch.Tensor:
        """master: any shape, the copy's → the copy."""
        return self._copy.routed()


class MasterEmbedding(nn.Module):
    """Replaces an `nn.Embedding`: rows of the copy; see `MasterCopy.looked_up`."""

    def __init__(self, embedding: nn.Embedding, copy: MasterCopy):
        super().__init__()
        self.master = embedding.weight
        self.copy = copy
        self.padding_idx = -1 if embedding.padding_idx is None else embedding.padding_idx

    @property
    def weight(self) -> torch.Tensor:
        """The copy, compute dtype [V, H]."""
        return self.copy.read

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 of any shape → compute dtype [..., H]."""
        return self.copy.looked_up(tokens, self.padding_idx)


def plain_lookup(embedding: nn.Embedding) -> bool:
    """Whether `MasterEmbedding` does all that this embedding does."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _empty_copy(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for a copy of a master, of any dtype; `LowBitModel.refresh` fills it."""
    return torch.empty(whole_shape(master), dtype=dtype, device=master.device)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, master: torch.Tensor, copy: torch.Tensor, gradients: Gradients
    ) -> torch.Tensor:
        ctx.master, ctx.gradients = master, gradients
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        gradient = ctx.gradients.unscaled(grad_outputs[0].to(torch.float32, copy=True))
        return ctx.gradients.delivered(ctx.master, gradient), None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        master: torch.Tensor,
        copy: MasterCopy,
        padding: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.master, ctx.copy, ctx.padding = master, copy, padding
        return nn.functional.embedding(tokens, copy.read)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        dy, gradients = grad_outputs[0].to(torch.float32), ctx.copy.context.gradients
        total = gradients.into(ctx.master)
        if total is not None:
            taught = tokens != ctx.padding
            add_rows(total, tokens[taught], gradients.unscaled(dy[taught]))
            return None, None, None, None
        rows = ctx.copy.read.shape[0]
        gradients.make_way(ctx.master)
        gradient = torch.ops.aten.embedding_dense_backward(dy, tokens, rows, ctx.padding, False)
        return (
            None,
            gradients.delivered(ctx.master, gradients.unscaled(gradient)),
            None,
            None,
        )
