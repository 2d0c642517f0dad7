"""In which precision gradients go back through linear layers (`learner.input_gradients`)."""

from typing import Literal

from qarl.config import ConfigError
from quant.backward import multiplies_natively
from quant.model import LowBitModel


def rounds_weights(model: LowBitModel, asked: Literal["auto", "exact", "compute"]) -> bool:
    """Whether weights are rounded to the compute dtype for dx; auto: where the device multiplies that natively.

    Raises `ConfigError` for `compute` where the model has experts, whose backward is exact.
    """
    if asked == "compute" and model.experts:
        raise ConfigError(
            f"learner.input_gradients is 'compute', but gradients through experts ({next(iter(model.experts))} and "
            "others) are computed exactly; set it to auto, which is about the linear layers, or to exact"
        )
    return multiplies_natively(model.compute_dtype, model.device) if asked == "auto" else asked == "compute"
