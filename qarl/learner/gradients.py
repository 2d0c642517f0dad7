"""Options of the backward: `learner.gradient_checkpointing`, `input_gradients` and `compile`."""

from typing import Literal

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.quant.layers.straight_through import multiplies_natively
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.compile import compiler_missing


def configure_backward(model: LowBitModel, config: LearnerConfig) -> None:
    """Configure the model's backward as a `learner` section says.

    Raises `ConfigError` for options that this model or machine does not support.
    """
    model.set_gradient_checkpointing(config.gradient_checkpointing is True)
    exact = not rounds_weights(model, config.input_gradients)
    model.gradients.configure(fp32_input_grad=exact, compiled=compiles(model, config.compile))


def rounds_weights(model: LowBitModel, setting: Literal["auto", "exact", "compute"]) -> bool:
    """Return whether weights are rounded to the compute dtype for dx.

    auto: if the device multiplies that dtype natively. Raises `ConfigError` for `compute` if the
    model has experts, whose backward is exact.
    """
    if setting == "compute" and model.experts:
        raise ConfigError(
            "learner.input_gradients is 'compute', but gradients through experts"
            f" ({next(iter(model.experts))} and others) are computed exactly; set it to auto, which"
            " is about the linear layers, or to exact"
        )
    if setting == "auto":
        return multiplies_natively(model.context.compute_dtype, model.device)
    return setting == "compute"


def compiles(model: LowBitModel, setting: bool | Literal["auto"]) -> bool:
    """Return whether backward passes are compiled.

    auto: with the engine's operators on GPUs, where a run needs Triton and a compiler anyway.
    Raises `ConfigError` if compiling is asked for but impossible.
    """
    if setting == "auto":
        return (
            model.device.type == "cuda"
            and model.operators == "engine"
            and not compiler_missing("cuda")
        )
    if not setting:
        return False
    if model.operators != "engine":
        raise ConfigError(
            "learner.compile is true, but it compiles the backwards of the engine's operators, and"
            " this model has transformers'; omit it, or set learner.operators to 'engine'"
            " where the model allows"
        )
    require_compiler(model.device.type)
    return True


def require_compiler(device: str) -> None:
    """Raise `ConfigError` if `learner.compile` is impossible on a device type."""
    missing = compiler_missing(device)
    if missing:
        raise ConfigError(
            f"learner.compile is true, but nothing can be compiled for {device} here: {missing};"
            " fix that, or omit it"
        )
