"""Sections of the loss: objectives, corrections, aggregations and the KL penalty, each chosen by
its name.

docs/reference/objectives.md derives all of them. Bounds are on ratios: 4e-4 allows a ratio of
1.0004.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from qarl.configs.schema.base import Choice, PathText, chooser

_OBJECTIVE = "Objective to maximize."
_CORRECTION = (
    "Weight that corrects the gap between sampler and learner. Default: the objective's own."
)
_AGGREGATION = "How token losses are combined into one number. Default: the objective's own."
_KL_PENALTY = (
    "Estimator of the penalty on the distance from the initial policy. The penalty needs a second"
    " model in memory."
)
_LOW = "Lower ratio bound for negative advantages, 1 - this."
_HIGH = "Upper ratio bound for positive advantages, 1 + this."
_DUAL = "Upper ratio bound for negative advantages (c)."


class Objective(Choice):
    """Objective to maximize, with the correction and aggregation of a run that names none."""

    default_correction: ClassVar[dict[str, Any]] = {"name": "token_tis"}
    """Correction of a run that names none."""
    default_aggregation: ClassVar[str] = "seq-mean-token-mean"
    """Name of the aggregation of a run that names none."""
    uses_ratio: ClassVar[bool] = True
    """True if the objective compares the current policy with an older one."""


class TbpoConfig(Objective):
    """Trust band on sequence ratios, with the bounds of the QaRL paper; the default."""

    default_correction: ClassVar[dict[str, Any]] = {"name": "geometric"}
    name: Literal["tbpo"] = Field(default="tbpo", description=_OBJECTIVE)
    epsilon_high: float = Field(
        default=4e-4,
        gt=0,
        description=(
            "Upper ratio bound for positive advantages, 1 + this. Raise it to allow larger updates."
        ),
    )
    delta_high: float = Field(
        default=7e-4,
        gt=0,
        description="Upper ratio bound for negative advantages, 1 + this.",
    )
    delta_low: float = Field(
        default=3e-4,
        gt=0,
        lt=1,
        description="Lower ratio bound for negative advantages, 1 - this.",
    )


class GrpoConfig(Objective):
    """Token ratio, clipped as in PPO; the usual baseline."""

    name: Literal["grpo"] = Field(default="grpo", description=_OBJECTIVE)
    clip_low: float = Field(default=0.2, gt=0, lt=1, description=_LOW)
    clip_high: float = Field(default=0.2, gt=0, description=_HIGH)


class PositiveGrpoConfig(Objective):
    """GRPO on samples of positive advantage only, which have no lower bound."""

    name: Literal["positive_grpo"] = Field(default="positive_grpo", description=_OBJECTIVE)
    clip_high: float = Field(default=0.2, gt=0, description=_HIGH)


class DapoConfig(GrpoConfig):
    """GRPO with a wider upper bound (clip-higher), against collapse of entropy."""

    default_aggregation: ClassVar[str] = "token-mean"
    name: Literal["dapo"] = Field(default="dapo", description=_OBJECTIVE)
    clip_high: float = Field(default=0.28, gt=0, description=_HIGH)


class DualClipConfig(GrpoConfig):
    """GRPO bounded for negative advantages too (dual-clip PPO), against error tokens."""

    name: Literal["dual_clip"] = Field(default="dual_clip", description=_OBJECTIVE)
    dual_clip: float = Field(default=3.0, gt=1, description=_DUAL)


class GspoConfig(Objective):
    """Sequence ratio, for long answers and mixtures of experts."""

    default_correction: ClassVar[dict[str, Any]] = {"name": "geometric"}
    name: Literal["gspo"] = Field(default="gspo", description=_OBJECTIVE)
    clip_low: float = Field(default=3e-4, gt=0, lt=1, description=_LOW)
    clip_high: float = Field(default=4e-4, gt=0, description=_HIGH)


class GspoDualClipConfig(GspoConfig):
    """GSPO bounded for negative advantages too."""

    name: Literal["gspo_dual_clip"] = Field(default="gspo_dual_clip", description=_OBJECTIVE)
    dual_clip: float = Field(default=3.0, gt=1, description=_DUAL)


class SapoConfig(Objective):
    """Soft gate instead of a clip, with the temperatures that SAPO recommends."""

    name: Literal["sapo"] = Field(default="sapo", description=_OBJECTIVE)
    tau_positive: float = Field(
        default=1.0, gt=0, description="Temperature of the gate for positive advantages."
    )
    tau_negative: float = Field(
        default=1.05, gt=0, description="Temperature of the gate for negative advantages."
    )


class CispoConfig(Objective):
    """REINFORCE with a capped, detached ratio, so that no token's gradient is cut.

    MiniMax-M1 publishes no bound; 5 is within the range ScaleRL (arXiv 2510.13786) found good.
    """

    default_aggregation: ClassVar[str] = "token-mean"
    name: Literal["cispo"] = Field(default="cispo", description=_OBJECTIVE)
    ratio_cap: float = Field(
        default=5.0, ge=1, description="Upper bound on the detached token ratio."
    )


class OnPolicyConfig(Objective):
    """One update per batch, without a ratio and without options."""

    uses_ratio: ClassVar[bool] = False
    name: Literal["on_policy"] = Field(default="on_policy", description=_OBJECTIVE)


class PgSeqIsConfig(Objective):
    """REINFORCE with the importance weight of the whole sequence."""

    default_correction: ClassVar[dict[str, Any]] = {
        "name": "none",
        "ratio_from": "sampler",
    }
    default_aggregation: ClassVar[str] = "seq-sum"
    name: Literal["pg_seq_is"] = Field(default="pg_seq_is", description=_OBJECTIVE)


class OwnConfig(Objective):
    """Your own function, which is called like those in `learner/objectives/`; see
    `learner.objectives.own`.
    """

    name: Literal["own"] = Field(default="own", description=_OBJECTIVE)
    function: PathText = Field(
        description=(
            "Your objective, as file.py:function or package.module:function(inputs, config)"
            " (docs/reference/objectives.md)."
        )
    )


AnyObjective = (
    TbpoConfig
    | GrpoConfig
    | PositiveGrpoConfig
    | DapoConfig
    | DualClipConfig
    | GspoConfig
    | GspoDualClipConfig
    | SapoConfig
    | CispoConfig
    | OnPolicyConfig
    | PgSeqIsConfig
    | OwnConfig
)
ObjectiveChoice = Annotated[
    AnyObjective,
    Field(discriminator="name"),
    BeforeValidator(chooser("objective", "learner.objective", AnyObjective, "tbpo")),
]

_RATIO_FROM = (
    "Denominator of the ratio: the learner before the batch, or the sampler (bypass), which needs"
    " no weight."
)


class NoCorrection(Choice):
    """No correction weight."""

    name: Literal["none"] = Field(default="none", description=_CORRECTION)
    ratio_from: Literal["learner", "sampler"] = Field(default="learner", description=_RATIO_FROM)


class TruncatedConfig(Choice):
    """Truncated importance sampling, or the geometric sequence weight with QaRL's two-sided cap."""

    name: Literal["token_tis", "sequence_tis", "geometric"] = Field(
        default="token_tis", description=_CORRECTION
    )
    cap: float = Field(
        default=2.0,
        ge=1,
        description="Largest weight; with geometric the smallest is 1 / this.",
    )


class TokenMisConfig(Choice):
    """Masked importance sampling, with the bounds of IcePop."""

    name: Literal["token_mis"] = Field(default="token_mis", description=_CORRECTION)
    cap: float = Field(default=5.0, ge=1, description="Largest weight; a larger one becomes 0.")
    floor: float = Field(
        default=0.5, ge=0, lt=1, description="Smallest weight; a smaller one becomes 0."
    )
    ratio_from: Literal["learner", "sampler"] = Field(default="learner", description=_RATIO_FROM)


class SequenceMisConfig(Choice):
    """Masked importance sampling by the weight of the whole sequence, bounded only from above."""

    name: Literal["sequence_mis"] = Field(default="sequence_mis", description=_CORRECTION)
    cap: float = Field(default=2.0, ge=1, description="Largest weight; a larger one becomes 0.")
    floor: float = Field(
        default=0.0, ge=0, lt=1, description="Smallest weight; a smaller one becomes 0."
    )
    ratio_from: Literal["learner", "sampler"] = Field(default="learner", description=_RATIO_FROM)


AnyCorrection = NoCorrection | TruncatedConfig | TokenMisConfig | SequenceMisConfig
CorrectionChoice = Annotated[
    AnyCorrection,
    Field(discriminator="name"),
    BeforeValidator(chooser("correction", "learner.correction", AnyCorrection)),
]


def ratio_from(correction: Any) -> str:
    """Return the denominator of a correction's ratio: "learner" or "sampler". Corrections that
    weight by learner over sampler allow only the learner.
    """
    return getattr(correction, "ratio_from", "learner")


class MeanAggregation(Choice):
    """Mean over all tokens of a mini-batch (token-mean), or within each response and then over
    responses (seq-mean-token-mean).
    """

    name: Literal["token-mean", "seq-mean-token-mean"] = Field(
        default="seq-mean-token-mean", description=_AGGREGATION
    )


class SeqSumAggregation(Choice):
    """Sum over a response's tokens, divided by a constant, then the mean over responses (Dr.
    GRPO).
    """

    name: Literal["seq-sum"] = Field(default="seq-sum", description=_AGGREGATION)
    constant: float = Field(
        default=1.0, gt=0, description="Divisor of each response's sum; 1 leaves the sum as it is."
    )


AnyAggregation = MeanAggregation | SeqSumAggregation
AggregationChoice = Annotated[
    AnyAggregation,
    Field(discriminator="name"),
    BeforeValidator(chooser("aggregation", "learner.aggregation", AnyAggregation)),
]


class NoKl(Choice):
    """No KL penalty, and no reference policy in memory."""

    name: Literal["none"] = Field(default="none", description=_KL_PENALTY)


class KlConfig(Choice):
    """Penalty on the distance from the policy that the run started with."""

    name: Literal["k1", "k2", "k3"] = Field(default="k3", description=_KL_PENALTY)
    coefficient: float = Field(
        default=1e-3,
        gt=0,
        description=(
            "Weight β of the penalty: loss per nat of KL per token. Raise it if the policy drifts"
            " too far."
        ),
    )


AnyKl = NoKl | KlConfig
KlChoice = Annotated[
    AnyKl,
    Field(discriminator="name"),
    BeforeValidator(chooser("KL penalty", "learner.kl", AnyKl, "none")),
]
