"""TBPO for prime-rl (docs/reference/objectives.md).

Set `[trainer.loss] type = "custom"`, `import_path = "qarl.integrations.prime_rl.tbpo"`, and the
bounds in `kwargs`.
"""

from typing import Any

import torch
from prime_rl.trainer.rl.loss import (  # pyright: ignore[reportMissingImports]
    LossInputs,
    LossOutputs,
)

from qarl import losses


def tbpo(inputs: LossInputs, **bounds: Any) -> LossOutputs:
    """Return the loss of one sample, summed over its tokens, 0-d with gradient, and its metrics.

    inputs: prime-rl's, all of shape [T]: log-probs of trainer and inference, which make the ratio,
    advantages, mask, and weights or None. bounds: epsilon_high, delta_high, delta_low. Default: the
    paper's. Raises `ConfigError` for unknown or out-of-range bounds, and for advantages that differ
    within the sample.
    """
    mask = inputs.loss_mask
    weight = None if inputs.loss_weights is None else inputs.loss_weights[None]
    result = losses.tbpo.of_tokens(
        inputs.trainer_logprobs[None],
        inputs.inference_logprobs[None],
        inputs.advantages[None],
        mask[None],
        weight,
        **bounds,
    )
    if mask.any():
        clipped = result.clipped[0][mask].float().mean()
    else:
        clipped = mask.new_zeros((), dtype=torch.float32)
    return LossOutputs(loss=result.loss[0][mask].sum(), metrics={"tbpo/clipped": clipped})
