"""One of vLLM's operators with gradients, as in a graph, without an engine."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.quant.graph.operators import Operator
from qarl.quant.layers.compute_copy import MasterCopy
from qarl.quant.layers.context import LayerContext
from tests.support.tensors import normal


def make_operator(
    make: Callable[[], CustomOp], dtype: torch.dtype, compiled=False, device="cpu"
) -> Operator:
    """Make an operator whose weights are about one and representable in
    bfloat16 for every dtype.
    """
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(dtype),
        torch.device(device),
    ):
        module = make()
    context = LayerContext(dtype, "reference")
    weights = {}
    context.gradients.configure(compiled=compiled)
    for seed, (key, parameter) in enumerate(list(module.named_parameters())):
        values = (1 + 0.3 * normal(*parameter.shape, seed=seed)).bfloat16()
        master = nn.Parameter(values.float().to(device))
        weights[key] = MasterCopy(master, context)
        weights[key].refresh()
        del module._parameters[key]
        module.__dict__[key] = weights[key].read
    return Operator(module, weights, context.gradients)


def rope(
    head: int,
    part: float = 1.0,
    neox: bool = True,
    **scaling: Any,
) -> Callable[[], CustomOp]:
    """Return a rotary embedding. part: fraction of a head that is rotated. neox: rotate halves
    instead of neighbours.
    """
    parameters = {
        "rope_theta": 1e4,
        "rope_type": "default",
        "partial_rotary_factor": part,
        **scaling,
    }
    return lambda: get_rope(head, 4096, neox, rope_parameters=parameters)


def outputs_of(y: Any) -> list[torch.Tensor]:
    outputs = y if isinstance(y, tuple) else (y,)
    return [output for output in outputs if output is not None]


def differentiated(
    call: Callable[..., Any],
    arguments: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the operator's results, and the gradients of its differentiable arguments and of
    masters.
    """
    y = outputs_of(call(*arguments))
    leaves = [t for t in arguments if t.requires_grad]
    dy = []
    for n, output in enumerate(y):
        values = normal(output.numel(), 1, seed=7 + n)
        dy.append(values.view(output.shape).to(output))
    gradients = torch.autograd.grad(y, [*leaves, *masters], dy)
    return [output.detach() for output in y], list(gradients)
