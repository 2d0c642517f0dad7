"""The objectives of `qarl train` as functions of tensors.

Each takes log-probs of the same tokens by the policy being stepped, by the policy before the batch
and by the sampler. It returns the loss and its metrics. Axes: B sequences, T tokens, of which T-1
are predicted. docs/reference/objectives.md has the formulas.
"""

from dataclasses import dataclass
from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.configs.load import config_from_tree
from qarl.learner.loss.aggregation import BatchSize
from qarl.learner.loss.loss import LossInput, LossShare, needs_old, policy_loss
from qarl.learner.objectives import ObjectiveInput, ObjectiveResult, find_objective


@dataclass(frozen=True)
class Loss:
    """One objective, by its name."""

    name: str
    """Name of the objective, as in `learner.objective`."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor | None,
        sampler_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *,
        reference_logprobs: torch.Tensor | None = None,
        totals: tuple[int, int] | None = None,
        **options: Any,
    ) -> LossShare:
        """Return the loss of these sequences: `.loss`, 0-d with gradient, and `.metrics`.

        Args:
            logprobs: Log-probs by the policy being stepped, fp32 [B, T-1], nats, with gradient.
            old_logprobs: Log-probs by the policy before the batch, fp32 [B, T-1], nats. None if
                neither the ratio nor the correction uses them.
            sampler_logprobs: Log-probs by the sampler, fp32 [B, T-1], nats.
            advantages: fp32 [B], or [B, T-1].
            mask: bool [B, T-1], the tokens to learn from.
            reference_logprobs: Log-probs by the reference policy, fp32 [B, T-1], nats; used by `kl`
                only.
            totals: Numbers of sequences and tokens of the whole mini-batch, if these sequences are
                a part of it. The losses of such parts add up. Default: these are all.
            options: The objective's own options (default: those of its paper), and correction,
                aggregation and kl, each a name or a mapping with its options, as in `learner.*` of
                a run (default: the objective's).

        Raises:
            ConfigError: An option is unknown or out of range, or the tensors do not go together.
        """
        names = ("correction", "aggregation", "kl")
        sections = {name: options.pop(name) for name in names if name in options}
        sections = {
            name: {"name": section} if isinstance(section, str) else section
            for name, section in sections.items()
        }
        tree = {
            "objective": {"name": self.name, **options},
            "mini_batches": 1,
            **sections,
        }
        config = config_from_tree({"learner": tree}).learner
        if old_logprobs is None and needs_old(config):
            raise ConfigError(f"loss {self.name} needs old_logprobs; give them as [B, T-1]")
        if reference_logprobs is None and config.kl.name != "none":
            raise ConfigError(f"loss {self.name} needs reference_logprobs; give them as [B, T-1]")
        if mask.dtype != torch.bool:
            raise ConfigError(
                f"loss {self.name}: the mask has dtype {mask.dtype}; give it as torch.bool"
            )
        token_advantages = advantages
        if advantages.ndim == 1 and len(advantages) == len(mask):
            token_advantages = advantages[:, None].expand(mask.shape)
        tensors = (
            logprobs,
            sampler_logprobs,
            mask,
            old_logprobs,
            reference_logprobs,
            token_advantages,
        )
        shapes = {tuple(t.shape) for t in tensors if t is not None}
        if len(shapes) > 1:
            raise ConfigError(
                f"loss {self.name}: log-probs, mask and advantages of tokens have several shapes,"
                f" {sorted(shapes)}; give all as [B, T-1], or advantages of sequences as [B]"
            )
        # Not a product with the mask: NaN at a masked token would stay NaN.
        old, reference = (
            t if t is None else torch.where(mask, t, 0.0)
            for t in (old_logprobs, reference_logprobs)
        )
        terms = LossInput(
            current=torch.where(mask, logprobs, 0.0),
            old=old,
            sampler=torch.where(mask, sampler_logprobs, 0.0),
            reference=reference,
            response_mask=mask,
            advantages=torch.where(mask, token_advantages, 0.0),
        )
        sequences, tokens = totals or (len(mask), int(mask.sum()))
        return policy_loss(terms, config, BatchSize(sequences, tokens))

    def of_tokens(
        self,
        logprobs: torch.Tensor,
        proximal_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        weight: torch.Tensor | None = None,
        **options: Any,
    ) -> ObjectiveResult:
        """Return the objective alone, for a trainer that corrects and sums by itself.

        The result has `.loss` of each token and `.clipped`, which is set where a bound was reached,
        both [B, T-1].

        Args:
            logprobs: Numerator of the ratio, fp32 [B, T-1], nats.
            proximal_logprobs: Denominator of the ratio, fp32 [B, T-1], nats.
            advantages: fp32 [B, T-1].
            mask: bool [B, T-1].
            weight: The trainer's own correction, fp32 [B, T-1]. Default: 1.
            options: The objective's options.

        Raises:
            ConfigError: An option is unknown or out of range, or an objective with one ratio per
                sequence gets several advantages in a sequence.
        """
        tree = {"objective": {"name": self.name, **options}, "mini_batches": 1}
        section = config_from_tree({"learner": tree}).learner.objective
        terms = ObjectiveInput(
            current=torch.where(mask, logprobs, 0.0),
            proximal=torch.where(mask, proximal_logprobs, 0.0),
            weight=torch.ones_like(logprobs),
            response_mask=mask,
            advantages=torch.where(mask, advantages, 0.0),
        )
        result = find_objective(section)(terms, section)
        loss = result.loss if weight is None else result.loss * weight
        return ObjectiveResult(loss.expand_as(mask), result.clipped.expand_as(mask))


tbpo = Loss("tbpo")
grpo = Loss("grpo")
positive_grpo = Loss("positive_grpo")
dapo = Loss("dapo")
dual_clip = Loss("dual_clip")
gspo = Loss("gspo")
gspo_dual_clip = Loss("gspo_dual_clip")
sapo = Loss("sapo")
cispo = Loss("cispo")
on_policy = Loss("on_policy")
pg_seq_is = Loss("pg_seq_is")
