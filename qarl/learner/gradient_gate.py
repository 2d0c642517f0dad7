"""That a backward reaches every master, before a run learns from it.

A forward through the engine's own model can be exact while its gradient is cut: by a weight read
outside autograd, a `no_grad` within, a compiled helper, an operator nobody knew. No log-prob tells;
a master that stands still does, late.
"""

import torch

from qarl.configs.errors import GraphError, QarlError
from qarl.configs.words import few
from qarl.learner.logprobs import token_logprobs
from qarl.learner.processes import Processes, is_lost_process
from qarl.quant.model.low_bit_model import LowBitModel

_TOKENS = 8


def require_gradients(model: LowBitModel, processes: Processes) -> None:
    """Raise `GraphError` with the names of masters that no gradient reaches: none, or zeros in
    every element; and for a model that does not run.

    One sequence of a few tokens is scored and differentiated; no master is changed and no gradient
    kept. Adapters may get zeros, for B is zero at first. All processes that share masters come here
    together.
    """
    try:
        _differentiate(model)
    except (QarlError, torch.OutOfMemoryError):
        raise
    # vLLM's Python, for a model nobody tried: whatever it raises, the run cannot learn
    except Exception as error:
        if is_lost_process(error):
            raise
        raise GraphError(
            f"the engine's model could not be run and differentiated: {type(error).__name__}:"
            f" {error}; set learner.operators to 'transformers', and report the model"
        ) from error
    trained = {name: master for name, master in model.masters.items() if master.requires_grad}
    zeros_count = bool(model.adapted)
    here = [m.grad is not None and (zeros_count or bool(m.grad.any())) for m in trained.values()]
    reached = processes.total(torch.tensor(here, dtype=torch.float32))
    for master in trained.values():
        master.grad = None
    lost = [repr(name) for name, by in zip(trained, reached.tolist(), strict=True) if not by]
    if lost:
        raise GraphError(
            f"no gradient reaches {few(lost)}: the engine's model computes with them where autograd"
            " does not follow, so they would never be learned; set learner.operators to"
            " 'transformers', and report the model"
        )


def _differentiate(model: LowBitModel) -> None:
    tokens = torch.arange(1, _TOKENS + 1, device=model.device).remainder(model.config.vocab_size)[
        None
    ]
    responses = torch.ones(1, _TOKENS - 1, dtype=torch.bool, device=model.device)
    logprobs, _ = token_logprobs(model, tokens, responses, entropy=False)
    (logprobs * torch.linspace(0.5, 1.0, _TOKENS - 1, device=model.device)).sum().backward()
