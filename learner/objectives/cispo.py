"""CISPO: the capped ratio weights REINFORCE, so that no token loses its gradient.

    J = Σ_b Σ_t w_t · sg(min(r_t, c)) · A · log π_cur / Σ_b T_b,   sg: no gradient

Source: MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5; without a lower bound, as used there). The value is reported as
-w r̂ A; only its gradient is that of the line above.
"""

from qarl.configs.schema.objectives import CispoConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.clipping import token_ratio
from qarl.learner.objectives.ratios import score


def cispo(inputs: ObjectiveInput, config: CispoConfig) -> ObjectiveResult:
    """-w · r̂ · A · score of each token; `clipped` marks capped ratios, whose gradient stays."""
    ratio = token_ratio(inputs).detach()
    reinforce = ratio.clamp_max(config.ratio_cap) * inputs.advantages * score(inputs.current)
    return ObjectiveResult(-(inputs.weight * reinforce), ratio > config.ratio_cap)
