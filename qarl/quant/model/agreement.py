"""How near a learner of a model comes to its sampler, told from config.json alone."""

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from qarl.configs.errors import GraphError
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.surgery import replace_layers
from qarl.quant.schemes import get_scheme


@dataclass(frozen=True)
class Agreement:
    """level: "exact": the learner computes through the engine's own model, to the same bits.
    "floor": by transformers' operators, as near as two implementations in one dtype are. "refused":
    it would learn another policy. reason: why not better, "" where it is exact.
    """

    level: Literal["exact", "floor", "refused"]
    reason: str = ""


def agreement(model: PreTrainedModel, dtype: torch.dtype) -> Agreement:
    """Of a model on the meta device, in a compute dtype. Needs vLLM, and leaves the model
    unusable.
    """
    context, plan = (
        LayerContext(dtype, "reference"),
        plan_layers(model, get_scheme("bf16")),
    )
    try:
        layers = replace_layers(model, plan, context, "engine")
        from qarl.quant.model.engine_model import build_graph

        assert layers.engine is not None
        build_graph(model, layers.engine, None, layers, context, RouterLog())
    except GraphError as error:
        why = str(error)
    else:
        return Agreement("exact")
    try:
        replace_layers(model, plan, context, "transformers")
    except GraphError as error:
        return Agreement("refused", f"{why}; {error}")
    return Agreement("floor", why)
