"""The auxiliary loss that keeps a mixture's routers from sending every token to the same experts.

Axes: B sequences, T tokens, L layers of experts, E experts, K experts a token.
"""

import sys
from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.quant.checkpoint.families import experts_per_token
from qarl.quant.graph.packing import Packed
from qarl.quant.model.low_bit_model import LowBitModel


def load_balance_coefficient(model: LowBitModel, setting: float | None) -> float:
    """Return the factor of the loss.

    It is `setting`. None: the model's own factor if its config switches the loss on, else 0. Raises
    `ConfigError` if a factor is set for a model that has no such loss.
    """
    own = getattr(model.config, "router_aux_loss_coef", None)
    if setting and (own is None or not model.experts):
        raise ConfigError(
            f"learner.router_aux_loss is {setting}, but model type {model.config.model_type!r} has"
            " no load-balance loss; omit it"
        )
    if setting is not None:
        return setting
    is_on = model.experts and getattr(model.config, "output_router_logits", False)
    return float(own or 0.0) if is_on else 0.0


def load_balance_loss(
    model: LowBitModel, real: torch.Tensor, packed: Packed | None
) -> torch.Tensor:
    """Return the routers' auxiliary loss over all layers, 0-d.

    It is E · Σ_e (fraction of assignments to e) · (mean router probability of e), so K if the load
    is balanced. The function is that of the model's own transformers module (Switch Transformer,
    arXiv 2101.03961, eq. 4-6). It reads the router logits of the last forward.

    Args:
        real: which tokens are not padding, bool [B, T].
        packed: how the tokens were packed in that forward. A token that several sequences share
            counts once for each of them.
    """
    module: Any = sys.modules[type(model.module).__module__]
    experts = next(iter(model.experts.values())).shape.experts
    logits = tuple(model.router_log.logits)
    real = real.flatten()
    if packed is not None:
        # Unpack the logits of real tokens, so that none of them is padding.
        positions = packed.places.flatten()[real]
        logits = tuple(layer[positions] for layer in logits)
        real = real[real]
    return module.load_balancing_loss_func(logits, experts, experts_per_token(model.config), real)
