"""TBPO for prime-rl: `[trainer.loss] type = "custom"`, `import_path =
"qarl.integrations.prime_rl.tbpo"`, bounds in `kwargs` (docs/reference/objectives.md).
"""

from typing import Any

import torch
from prime_rl.trainer.rl.loss import (  # pyright: ignore[reportMissingImports]
    LossInputs,
    LossOutputs,
)

from qarl import losses


def tbpo(inputs: LossInputs, **bounds: Any) -> LossOutputs:
    """prime-rl's loss of one sample: the sum over its tokens, 0-d with gradient, and its metrics.

    inputs: prime-rl's, of tokens [T]: log-probs of trainer and inference, whose ratio it is,
    advantages, mask, and weights or None. bounds: epsilon_high, delta_high, delta_low; by default
    the paper's. Raises `ConfigError` for others or out of range, and for advantages that differ
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
    clipped = (
        result.clipped[0][mask].float().mean()
        if mask.any()
        else mask.new_zeros((), dtype=torch.float32)
    )
    return LossOutputs(loss=result.loss[0][mask].sum(), metrics={"tbpo/clipped": clipped})
