"""PG-Seq-IS: REINFORCE under the importance weight of the whole sequence, the unbiased off-policy gradient.

    W = Π_t π_cur / π_proximal,   J = 1/B Σ_b sg(W) · A · Σ_t log π_cur

Source: "Defeating the training-inference mismatch via FP16" (arXiv 2510.26788, section 4). By default π_proximal is
the sampler (`ratio_from: sampler`), as there; against the learner, `sequence_tis` and `sequence_mis` give its
truncated and masked variants up to the drift within a batch. log W is held within ±20, so that float32 stays finite.
"""

from qarl.configs.schema.objectives import PgSeqIsConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.ratios import score

_LOG_BOUND = 20.0


def pg_seq_is(inputs: ObjectiveInput, config: PgSeqIsConfig) -> ObjectiveResult:
    """-w · W · A · score of each token; `clipped` marks sequences whose log W was held."""
    log_weight = ((inputs.current.detach() - inputs.proximal) * inputs.response_mask).sum(-1, keepdim=True)
    weight = log_weight.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    reinforce = weight * inputs.advantages * score(inputs.current)
    return ObjectiveResult(-(inputs.weight * reinforce), log_weight.abs() > _LOG_BOUND)
