"""Check that a backward reaches every master, before a run learns from it.

A forward through the engine's own model can be exact while its gradient is cut: by a weight that is
read outside autograd, by a `no_grad` inside, by a compiled helper, or by an unknown operator. No
log-prob shows it, and a master that never moves shows it late.

A gradient can also be rightly zero: in a block that was added as identity, o_proj and down_proj are
zero, and so are the gradients of all that comes before them, until the first update. If a gradient
is zero, the backward is therefore repeated with other values where masters are zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qarl.configs.errors import GraphError, QarlError
from qarl.configs.words import few
from qarl.learner.logprobs import token_logprobs
from qarl.learner.processes import Processes, is_lost_process
from qarl.quant.graph.packing import pack_prompts
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import own_rows

_TOKENS = 8
"""Length of the sequence that is differentiated."""

_MAGNITUDE = 0.02
"""Largest absolute value that replaces zeros in a master that has nothing else: the usual standard
deviation of new weights.
"""


def require_gradients(model: LowBitModel, processes: Processes) -> None:
    """Raise `GraphError` if masters get no gradient, naming them, or if the model does not run.

    A master gets none if its gradient is missing, or zero in every element, with the model's own
    values and with other ones in place of all zeros. Adapters may have zeros, because their B is
    zero at first. One sequence of a few tokens is scored and differentiated; masters and codes are
    the same afterwards, to the last bit, and no gradient is left. Collective: all processes that
    share masters call it together.
    """
    unreached = _unreached(model, processes)
    if unreached:
        with _zeros_replaced(model):
            unreached &= _unreached(model, processes)
    if unreached:
        names = [repr(name) for name in model.masters if name in unreached]
        raise GraphError(
            f"no gradient reaches {few(names)}: the engine's model computes with them where"
            " autograd does not follow, so they would never be learned; set learner.operators to"
            " 'transformers', and report the model"
        )


def _unreached(model: LowBitModel, processes: Processes) -> set[str]:
    """Return the names of trained masters to which no gradient gets in any process."""
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
        master.grad is not None and (zeros_count or bool(own_rows(master.grad).any()))
        for master in trained.values()
    ]
    # The number of processes in which a gradient reaches each master.
    reached = processes.all_reduce(torch.tensor(reached_here, dtype=torch.float32))
    for master in trained.values():
        master.grad = None
    return {name for name, count in zip(trained, reached.tolist(), strict=True) if not count}


@contextmanager
def _zeros_replaced(model: LowBitModel) -> Iterator[None]:
    """Make a weight version without zeros in its masters, within this context.

    The masters' zeros, with their signs, and the model's own weight version return afterwards.
    """
    own: dict[str, tuple[Tensor, Tensor]] = {}  # name → (mask, values under it)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, master in model.loaded.items():
            rows = own_rows(master)
            zero = rows == 0
            if not zero.any():
                continue
            own[name] = (zero, rows[zero])
            largest = float(rows.abs().max()) or _MAGNITUDE
            values = torch.empty(len(own[name][1])).uniform_(0.5, 1.0, generator=generator)
            signs = torch.randint(2, values.shape, generator=generator) * 2 - 1
            rows[zero] = (values * signs * largest).to(rows)
    try:
        model.refresh()
        yield
    finally:
        with torch.no_grad():
            for name, (zero, values) in own.items():
                own_rows(model.loaded[name])[zero] = values
        model.refresh()


def _differentiate(model: LowBitModel) -> None:
    """Score one sequence, and differentiate a weighted sum of its log-probs."""
    device = model.device
    tokens = torch.arange(1, _TOKENS + 1, device=device).remainder(model.config.vocab_size)[None]
    responses = torch.ones(1, _TOKENS - 1, dtype=torch.bool, device=device)
    packed = pack_prompts(torch.tensor([_TOKENS], device=device), _TOKENS)
    logprobs, _ = token_logprobs(model, tokens, responses, packed=packed, entropy=False)
    weights = torch.linspace(0.5, 1.0, _TOKENS - 1, device=device)
    (logprobs * weights).sum().backward()
