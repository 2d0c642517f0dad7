"""Check that a backward reaches every master, before a run learns from it.

A forward through the engine's own model can be exact while its gradient is cut: by a weight that is
read outside autograd, by a `no_grad` inside, by a compiled helper, or by an unknown operator. No
log-prob shows it, and a master that never moves shows it late.
"""

import torch

from qarl.configs.errors import GraphError, QarlError
from qarl.configs.words import few
from qarl.learner.logprobs import token_logprobs
from qarl.learner.processes import Processes, is_lost_process
from qarl.quant.model.low_bit_model import LowBitModel

_TOKENS = 8
"""Length of the sequence that is differentiated."""


def require_gradients(model: LowBitModel, processes: Processes) -> None:
    """Raise `GraphError` if masters get no gradient, naming them, or if the model does not run.

    A master gets none if its gradient is missing, or zero in every element. Adapters may have
    zeros, because their B is zero at first. One sequence of a few tokens is scored and
    differentiated; no master is changed and no gradient is left. Collective: all processes that
    share masters call it together.
    """
    try:
        _differentiate(model)
    except (QarlError, torch.OutOfMemoryError):
        raise
    # vLLM's Python runs a model that nobody tried. Whatever it raises, the run cannot learn.
    except Exception as error:
        if is_lost_process(error):
            raise
        raise GraphError(
            f"the engine's model could not be run and differentiated: {type(error).__name__}:"
            f" {error}; set learner.operators to 'transformers', and report the model"
        ) from error
    trained = {name: master for name, master in model.masters.items() if master.requires_grad}
    zeros_count = bool(model.adapted)
    reached_here = [
        master.grad is not None and (zeros_count or bool(master.grad.any()))
        for master in trained.values()
    ]
    # The number of processes in which a gradient reaches each master.
    reached = processes.total(torch.tensor(reached_here, dtype=torch.float32))
    for master in trained.values():
        master.grad = None
    unreached = [
        repr(name) for name, count in zip(trained, reached.tolist(), strict=True) if not count
    ]
    if unreached:
        raise GraphError(
            f"no gradient reaches {few(unreached)}: the engine's model computes with them where"
            " autograd does not follow, so they would never be learned; set learner.operators to"
            " 'transformers', and report the model"
        )


def _differentiate(model: LowBitModel) -> None:
    """Score one sequence, and differentiate a weighted sum of its log-probs."""
    device = model.device
    tokens = torch.arange(1, _TOKENS + 1, device=device).remainder(model.config.vocab_size)[None]
    responses = torch.ones(1, _TOKENS - 1, dtype=torch.bool, device=device)
    logprobs, _ = token_logprobs(model, tokens, responses, entropy=False)
    weights = torch.linspace(0.5, 1.0, _TOKENS - 1, device=device)
    (logprobs * weights).sum().backward()
