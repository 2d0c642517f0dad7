"""A low-rank adapter of one frozen weight (LoRA, arXiv 2106.09685).

merged = W + s · B A, with s = alpha / rank. The merged weight is what is materialized, so the
policy that is sampled from has no adapter beside its codes. With the rounding counted as identity,
dW = dyᵀ x̂ reaches the factors as dB = s · dW Aᵀ and dA = s · Bᵀ dW. dW itself is never computed:

    dB = s · dyᵀ (x̂ Aᵀ)        dA = s · (dy B)ᵀ x̂

Axes: N tokens, O output rows, I input columns, R rank, E experts.
"""

import math

import torch
from torch import Tensor, nn

from qarl.quant.runtime.shards import Shard


class Adapter(nn.Module):
    """Low-rank factors of one weight [O, I], or of each expert's weight in a stack [E, O, I].

    Both factors are fp32 whatever the base's dtype, because update steps are small.
    """

    def __init__(self, base: Tensor, rank: int, alpha: float, generator: torch.Generator):
        """Draw A from `generator`, on the CPU so that every machine draws the same values."""
        super().__init__()
        *experts, rows, columns = base.shape
        drawn = torch.empty(*experts, rank, columns)
        for matrix in drawn.view(-1, rank, columns):
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(drawn.to(base.device))
        """fp32 [R, I] or [E, R, I], drawn as peft draws it (Kaiming uniform with a = √5, so
        ±1/√I).
        """
        self.lora_B = nn.Parameter(torch.zeros(*experts, rows, rank, device=base.device))
        """fp32 [O, R] or [E, O, R], initially zeros, so that the first policy is the base."""
        self.rank = rank
        self.scale = alpha / rank
        """s, the factor of B A."""

    @torch.no_grad()
    def merge(self, base: Tensor, shard: Shard | None = None) -> Tensor:
        """Return base + s · B A, summed in fp32 and rounded once to the base's dtype and shape.

        If a B is all zeros the result is `base` itself, because adding nothing must change no bit,
        not even a zero's sign.

        Args:
            base: fp32, bf16 or fp16 [O, I] or [E, O, I], or this process's rows of it.
            shard: which rows `base` holds; None for the whole weight.
        """
        a = self.lora_A.detach()
        b = self.lora_B.detach()
        if shard is not None:
            # rows of an expert stack are experts, which have an A each; a single weight has one A
            a = shard.rows(a) if b.ndim > 2 else a
            b = shard.rows(b)
        if base.is_cuda:
            # `where`, because an `if` would make the host wait for the device
            nonzero = b.any(dim=-1).any(dim=-1)[..., None, None]
            return torch.where(nonzero, self._add(base, a, b), base)
        if b.ndim == 2:
            return self._add(base, a, b) if self.lora_B.any() else base
        if not b.any():
            return base
        merged = [
            self._add(expert_base, expert_a, expert_b) if expert_b.any() else expert_base
            for expert_base, expert_a, expert_b in zip(base, a, b, strict=True)
        ]
        return torch.stack(merged)

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        expert: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of A and B, or of one expert's A and B.

        dy: fp32 [N, O], of the output. x: fp32 [N, I], as multiplied.
        """
        a = self.lora_A.detach()
        b = self.lora_B.detach()
        if expert is not None:
            a = a[expert]
            b = b[expert]
        da = self.scale * ((dy @ b).t() @ x)
        db = self.scale * (dy.t() @ (x @ a.t()))
        return da, db

    def _add(self, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return base + s · b a, computed in fp32, in the base's dtype."""
        add = torch.addmm if b.ndim == 2 else torch.baddbmm
        merged = add(base.to(torch.float32), b, a, alpha=self.scale)
        return merged.to(base.dtype)
