"""A low-rank adapter of one frozen weight (LoRA, arXiv 2106.09685): merged = W + s · B A, s = alpha
/ rank.

What is materialized is the merged weight, so the policy that is sampled from has no adapter beside
its codes. With the rounding counted as identity, dW = dyᵀ x̂ reaches the factors as dB = s · dW Aᵀ
and dA = s · Bᵀ dW; dW is never made:

    dB = s · dyᵀ (x̂ Aᵀ)        dA = s · (dy B)ᵀ x̂

Axes: N tokens, O output rows, I input columns, R rank, E experts.
"""

import math

import torch
from torch import Tensor, nn

from qarl.quant.runtime.shards import Shard, whole_shape


class Adapter(nn.Module):
    """Of one weight [O, I], or of each expert's in a stack [E, O, I].

    lora_A: fp32 [R, I] or [E, R, I], drawn as peft draws it (Kaiming uniform with a = √5, so
    ±1/√I). lora_B: fp32 [O, R] or [E, O, R], zeros: the first policy is the base. Both are fp32
    whatever the base: steps are small. scale: s, what B A is multiplied with.
    """

    def __init__(self, base: Tensor, rank: int, alpha: float, generator: torch.Generator):
        """generator: on the CPU, so that every machine draws the same."""
        super().__init__()
        *experts, rows, columns = whole_shape(base)
        drawn = torch.empty(*experts, rank, columns)
        for matrix in drawn.view(-1, rank, columns):
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(drawn.to(base.device))
        self.lora_B = nn.Parameter(torch.zeros(*experts, rows, rank, device=base.device))
        self.rank = rank
        self.scale = alpha / rank

    @torch.no_grad()
    def merge(self, base: Tensor, shard: Shard | None = None) -> Tensor:
        """base + s · B A, added up in fp32 and rounded once to the base's dtype; shape of `base`.

        base: fp32, bf16 or fp16 [O, I] or [E, O, I], or this process's rows of it, which `shard`
        says. A B of zeros gives `base` itself: what adds nothing changes no bit, not even a zero's
        sign.
        """
        a, b = self.lora_A.detach(), self.lora_B.detach()
        if shard is not None:
            a, b = shard.rows(a) if b.ndim > 2 else a, shard.rows(b)
        if base.is_cuda:  # the host does not wait to hear which are zeros
            return torch.where(
                b.any(dim=-1).any(dim=-1)[..., None, None], self._add(base, a, b), base
            )
        if b.ndim == 2:
            return self._add(base, a, b) if self.lora_B.any() else base
        if not b.any():
            return base
        return torch.stack(
            [self._add(m, x, y) if y.any() else m for m, x, y in zip(base, a, b, strict=True)]
        )

    def gradients(self, dy: Tensor, x: Tensor, expert: int | None = None) -> tuple[Tensor, Tensor]:
        """Of A and B (of one expert's). dy: fp32 [N, O], of the output; x: fp32 [N, I], as
        multiplied.
        """
        a, b = self.lora_A.detach(), self.lora_B.detach()
        if expert is not None:
            a, b = a[expert], b[expert]
        return self.scale * ((dy @ b).t() @ x), self.scale * (dy.t() @ (x @ a.t()))

    def _add(self, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        add = torch.addmm if b.ndim == 2 else torch.baddbmm
        return add(base.to(torch.float32), b, a, alpha=self.scale).to(base.dtype)
