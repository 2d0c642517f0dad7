"""Compute-dtype copies of the parameters outside linear layers and experts.

The forward reads the copy. The same copy is published, unless the learner has a compute dtype of
its own (`learner.compute_dtype`). Autograd delivers the gradient to the master, in fp32 all the
way.

Axes: V vocabulary, H hidden columns.
"""

from typing import Any

import torch
from torch import nn

from qarl.quant.layers.context import Forward, LayerContext
from qarl.quant.layers.gradients import Gradients, add_rows
from qarl.quant.runtime.shards import fill, fp32_value, own_rows, shard_of


class MasterCopy:
    """Master of a parameter outside linear layers and experts, with its compute-dtype copies.

    The copies are uninitialized until `refresh`.

    Args:
        master: the parameter.
        context: settings and state that the layers share.
        dtype: dtype of all copies, for a tensor that the engine holds in another than its compute
            dtype.
    """

    def __init__(
        self, master: torch.Tensor, context: LayerContext, dtype: torch.dtype | None = None
    ):
        compute_dtype = dtype or context.compute_dtype
        dtype = dtype or context.dtype
        self.master = master
        """The parameter that the optimizer steps, any floating dtype."""
        self.published = _empty_copy(master, dtype)
        """Copy in the engine's dtype, which the engine reads."""
        self.computed = (
            self.published if compute_dtype == dtype else _empty_copy(master, compute_dtype)
        )
        """Copy in the learner's compute dtype; the same tensor as `published` if the dtypes are
        equal.
        """
        self.context = context
        """Settings and state shared by all layers of the model."""

    @property
    def read(self) -> torch.Tensor:
        """The copy that the present forward reads; in `Forward.FP32` the master's fp32 value."""
        if self.context.forward is Forward.FP32:
            return fp32_value(self.master)
        return self.published if self.context.forward_dtype == self.context.dtype else self.computed

    def refresh(self) -> None:
        """Overwrite the copies with the master's present values."""
        rows = own_rows(self.master.detach())
        fill(self.published, rows, shard_of(self.master))
        if self.computed is not self.published:
            fill(self.computed, rows, shard_of(self.master))

    def routed(self) -> torch.Tensor:
        """Return the copy that the forward reads; autograd routes its gradient to the master."""
        return _Route.apply(self.master, self.read, self.context.gradients)

    def looked_up(self, tokens: torch.Tensor, padding: int = -1) -> torch.Tensor:
        """Return the rows of the copy for these tokens.

        The backward sums the rows' gradients in fp32, without an intermediate gradient [V, H] in
        the compute dtype.

        Args:
            tokens: int64 of any shape.
            padding: token whose row gets no gradient; -1 for none.

        Returns compute dtype [..., H].
        """
        return _Lookup.apply(tokens, self.master, self, padding)


class ComputeCopy(nn.Module):
    """Torch parametrization: reading the parameter gives the copy.

    The copy's gradient goes to the master.
    """

    def __init__(self, copy: MasterCopy):
        super().__init__()
        self._copy = copy

    def forward(self, master: torch.Tensor) -> torch.Tensor:
        """Return the copy, of the same shape as `master`."""
        return self._copy.routed()


class MasterEmbedding(nn.Module):
    """Replacement for an `nn.Embedding`; see `MasterCopy.looked_up`."""

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
        """Return the tokens' embeddings: int64 of any shape → compute dtype [..., H]."""
        return self.copy.looked_up(tokens, self.padding_idx)


def plain_lookup(embedding: nn.Embedding) -> bool:
    """Return whether `MasterEmbedding` supports every option that this embedding uses."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _empty_copy(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized copy of a master in this dtype; `LowBitModel.refresh` fills it."""
    return torch.empty(master.shape, dtype=dtype, device=master.device)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, master: torch.Tensor, copy: torch.Tensor, gradients: Gradients
    ) -> torch.Tensor:
        ctx.master = master
        ctx.gradients = gradients
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        gradient = ctx.gradients.unscale(grad_outputs[0].to(torch.float32, copy=True))
        return ctx.gradients.start_reduction(ctx.master, gradient), None, None


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
        ctx.master = master
        ctx.copy = copy
        ctx.padding = padding
        return nn.functional.embedding(tokens, copy.read)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        dy = grad_outputs[0].to(torch.float32)
        gradients = ctx.copy.context.gradients
        total = gradients.accumulator(ctx.master)
        if total is not None:
            learned = tokens != ctx.padding
            add_rows(total, tokens[learned], gradients.unscale(dy[learned]))
            return None, None, None, None
        rows = ctx.copy.read.shape[0]
        gradients.wait_for_memory(ctx.master)
        gradient = torch.ops.aten.embedding_dense_backward(dy, tokens, rows, ctx.padding, False)
        dmaster = gradients.start_reduction(ctx.master, gradients.unscale(gradient))
        return None, dmaster, None, None
