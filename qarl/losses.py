"""The objectives of `qarl train` as functions of tensors; docs/reference/objectives.md has their
formulas.

Each takes log-probs of the same tokens by the policy being stepped, by the policy before the batch
and by the sampler, and returns what to descend with what it did. Axes: B sequences, T tokens, of
which T-1 are predicted.
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
        """The loss of these sequences: `.loss`, 0-d with gradient, and `.metrics`.

        logprobs, old_logprobs, sampler_logprobs, reference_logprobs: fp32 [B, T-1], nats: the first
        with gradient, the second None where neither ratio nor correction has it in, the last for
        `kl` alone. advantages: fp32 [B], or [B, T-1]. mask: bool [B, T-1], the tokens to learn
        from. totals: sequences and tokens of the mini-batch that these are a part of, for such
        parts add up; without it these are all. options: the objective's own, by default its
        paper's; and correction, aggregation and kl, each a name or a mapping with its options, as
        `learner.*` of a run, by default the objective's. Raises `ConfigError` for options that
        there are none of, or out of range, and for tensors that do not go together.
        """
        sections = {
            key: options.pop(key) for key in ("correction", "aggregation", "kl") if key in options
        }
        sections = {
            key: {"name": of} if isinstance(of, str) else of for key, of in sections.items()
        }
        tree = {
            "objective": {"name": self.name, **options},
            "mini_batches": 1,
            **sections,
        }
        config = config_from_tree({"learner": tree}).learner
        lacking = {"old_logprobs": old_logprobs is None and needs_old(config)}
        lacking |= {"reference_logprobs": reference_logprobs is None and config.kl.name != "none"}
        of_tokens = advantages
        if advantages.ndim == 1 and len(advantages) == len(mask):
            of_tokens = advantages[:, None].expand(mask.shape)
        tensors = (
            logprobs,
            sampler_logprobs,
            mask,
            old_logprobs,
            reference_logprobs,
            of_tokens,
        )
        shapes = {tuple(t.shape) for t in tensors if t is not None}
        if any(lacking.values()) or len(shapes) > 1 or mask.dtype != torch.bool:
            raise ConfigError(
                f"loss {self.name}: log-probs, mask and advantages of tokens have shapes"
                f" {sorted(shapes)}, the mask is of {mask.dtype}, and missing are"
                f" {[name for name, is_so in lacking.items() if is_so]}; give all as [B, T-1], the"
                " mask bool, advantages of sequences as [B]"
            )
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
            advantages=torch.where(mask, of_tokens, 0.0),
        )
        return policy_loss(terms, config, BatchSize(*(totals or (len(mask), int(mask.sum())))))

    def of_tokens(
        self,
        logprobs: torch.Tensor,
        proximal_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        weight: torch.Tensor | None = None,
        **options: Any,
    ) -> ObjectiveResult:
        """The objective alone, for a trainer that corrects and sums by itself: `.loss` of each
        token and `.clipped`, where a bound was reached, both [B, T-1].

        logprobs, proximal_logprobs: fp32 [B, T-1], nats, of the ratio. advantages: fp32 [B, T-1].
        mask: bool [B, T-1]. weight: the trainer's own correction, fp32 [B, T-1], by default 1.
        options: the objective's. Raises `ConfigError` for options that there are none of or out of
        range, and where an objective with one ratio a sequence meets several advantages in it.
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


tbpo, grpo, positive_grpo, dapo = (
    Loss("tbpo"),
    Loss("grpo"),
    Loss("positive_grpo"),
    Loss("dapo"),
)
dual_clip, gspo, gspo_dual_clip = (
    Loss("dual_clip"),
    Loss("gspo"),
    Loss("gspo_dual_clip"),
)
sapo, cispo, on_policy, pg_seq_is = (
    Loss("sapo"),
    Loss("cispo"),
    Loss("on_policy"),
    Loss("pg_seq_is"),
)
