"""The auxiliary loss that keeps a mixture's routers from sending every token to the same experts.

Axes: B sequences, T tokens, L layers of experts, E experts.
"""

import sys
from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.quant.checkpoint.families import experts_per_token
from qarl.quant.graph.packing import Packed
from qarl.quant.model.low_bit_model import LowBitModel


def load_balance_coefficient(model: LowBitModel, setting: float | None) -> float:
    """The factor of the loss: `setting`, or with None the model's own where its config switches the
    loss on.

    Raises `ConfigError` where one is asked of a model that has no such loss.
    """
    own = getattr(model.config, "router_aux_loss_coef", None)
    if setting and (own is None or not model.experts):
        raise ConfigError(
            f"learner.router_aux_loss is {setting}, but model type {model.config.model_type!r} has"
            " no load-balance loss; leave it out"
        )
    if setting is None:
        return (
            float(own or 0.0)
            if model.experts and getattr(model.config, "output_router_logits", False)
            else 0.0
        )
    return setting


def load_balance_loss(
    model: LowBitModel, real: torch.Tensor, packed: Packed | None
) -> torch.Tensor:
    """E · Σ_e (share of assignments to e) · (mean router probability of e), over all layers; 0-d, K
    if balanced.

    real: bool [B, T], which tokens are no padding. packed: how they were, in the last forward,
    whose router logits are read; a token counts as often as there are sequences with it. It is the
    function of the model's own transformers module (Switch Transformer, arXiv 2101.03961, eq. 4-6).
    """
    module: Any = sys.modules[type(model.module).__module__]
    experts = next(iter(model.experts.values())).shape.experts
    logits, real = tuple(model.router_log.logits), real.flatten()
    if packed is not None:
        places = packed.places.flatten()[real]
        logits, real = tuple(layer[places] for layer in logits), real[real]
    return module.load_balancing_loss_func(logits, experts, experts_per_token(model.config), real)
