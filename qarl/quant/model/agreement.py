"""Prediction of how closely a learner can agree with its sampler, from config.json alone."""

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from qarl.configs.errors import GraphError, NoEngineModelError
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.surgery import replace_layers
from qarl.quant.schemes import get_scheme


@dataclass(frozen=True)
class Agreement:
    """Degree to which learner and sampler can agree."""

    level: Literal["exact", "floor", "refused", "no engine"]
    """One of four. "exact": the learner computes through the engine's own model, to the same bits.
    "floor": it computes through transformers' operators, as close as two implementations in one
    dtype are. "refused": it would learn another policy. "no engine": vLLM does not run
    the model on this machine.
    """
    reason: str = ""
    """Reason why the level is not better; "" if it is "exact"."""


def agreement(model: PreTrainedModel, dtype: torch.dtype) -> Agreement:
    """Return the degree to which learner and sampler of a model can agree in a compute dtype.

    `model` is on the meta device and unusable afterwards. Needs vLLM.
    """
    context = LayerContext(dtype, "reference")
    plan = plan_layers(model, get_scheme("bf16"))
    try:
        layers = replace_layers(model, plan, context, "engine")
        from qarl.quant.model.engine_model import build_graph

        assert layers.engine is not None
        build_graph(model, layers.engine, None, layers, context, RouterLog())
    except NoEngineModelError as error:
        return Agreement("no engine", str(error))
    except GraphError as error:
        why = str(error)
    else:
        return Agreement("exact")
    try:
        replace_layers(model, plan, context, "transformers")
    except GraphError as error:
        return Agreement("refused", f"{why}; {error}")
    return Agreement("floor", why)
