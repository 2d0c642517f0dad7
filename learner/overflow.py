"""Numbers that left their dtype's range: found before they are learned from, and traced to where they arose.

float16 ends at 65504. A forward beyond it gives infinity, and NaN from there on; a loss made of those has no gradient
to step with, so the run would skip every update and never say why. The good case costs one look at the log-probs.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qarl.learner.batching import Batch
from qarl.learner.logprobs import token_logprobs
from qarl.learner.optim.loss_scale import WIDER_THAN_FLOAT16, PrecisionError, short_name
from qarl.quant.model.low_bit_model import LowBitModel


def require_finite_logprobs(model: LowBitModel, rows: Batch, logprobs: torch.Tensor, packed: bool) -> None:
    """Raise `PrecisionError` where the forward of `rows` gave log-probs that are not finite, naming the first module
    whose output was not; it is found by a second forward, which all processes take part in.

    logprobs: fp32 [B, T-1], of those rows. packed: how the rows were computed.
    """
    wrong = int((~logprobs.isfinite()).sum())
    if wrong == 0:
        return
    fault = first_fault(model, rows, packed)
    dtype = short_name(model.context.forward_dtype)
    where = fault or "no module's output is, so it is their normalization"
    raise PrecisionError(
        f"{dtype} forward: the log-probs of {wrong} of {int(rows.response_mask.sum())} tokens are infinite or NaN; "
        f"{where}. {_remedy(model.context.forward_dtype)}; no step was taken from them"
    )


def require_finite_sampler(batch: Batch, dtype: torch.dtype) -> None:
    """Raise `PrecisionError` where the engine's own log-probs are not finite. dtype: the engine's."""
    wrong = int((~batch.sampler_logprobs.isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"the engine's log-probs of {wrong} of {int(batch.response_mask.sum())} tokens are infinite or NaN. "
            f"{_remedy(dtype)}; no step was taken from them, the last checkpoint is intact"
        )


@torch.no_grad()
def first_fault(model: LowBitModel, rows: Batch, packed: bool) -> str | None:
    """Forward `rows` again and watch every module; in words where it first stopped being finite, None where all outputs
    are. Arguments as above."""
    watch = _Watch(short_name(model.context.forward_dtype))
    handles = []
    for name, module in model.run_modules.named_modules():
        handles.append(module.register_forward_pre_hook(watch.entered(name), with_kwargs=True))
        handles.append(module.register_forward_hook(watch.left(name)))
    try:
        how = rows.packed() if packed else None
        token_logprobs(model, rows.tokens, rows.response_mask, rows.experts, how, entropy=False)
    finally:
        for handle in handles:
            handle.remove()
    return watch.fault


@dataclass
class _Call:
    """A module that is being run: the largest absolute value that went in, NaN where none was seen, and whether it has
    called another yet."""

    module: str
    largest: float
    calls: bool = False


class _Watch:
    """Hooks that look at what goes into and comes out of modules, until the first value that is not finite."""

    def __init__(self, dtype: str) -> None:
        self.fault: str | None = None
        self._dtype = dtype
        self._calls: list[_Call] = []

    def entered(self, name: str) -> Any:
        """A forward pre-hook of the module `name`."""

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = _numbers((args, {key: value for key, value in kwargs.items() if "mask" not in key}))
            caller = self._calls[-1] if self._calls else None
            if caller is not None:
                caller.calls = caller.calls or "parametrizations" not in name
                if self.fault is None and not _finite(inputs):
                    self.fault = self._in_words(caller, True, inputs)
            largest = max((float(t.abs().max()) for t in inputs if t.numel()), default=math.nan)
            self._calls.append(_Call(name, largest))

        return look

    def left(self, name: str) -> Any:
        """A forward hook of the module `name`."""

        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call, outputs = self._calls.pop(), _numbers(output)
            if self.fault is None and not _finite(outputs):
                self.fault = self._in_words(call, call.calls, outputs)

        return look

    def _in_words(self, call: _Call, inside: bool, tensors: list[torch.Tensor]) -> str:
        """inside: whether between the modules that it calls, so that no call of one shows it. tensors: what is not
        finite."""
        between = "between the modules within" if inside else "the output of"
        largest = "" if math.isnan(call.largest) else f", its input being at most {call.largest:.3g}"
        bad, count = sum(int((~t.isfinite()).sum()) for t in tensors), sum(t.numel() for t in tensors)
        return (
            f"the first values that are not finite in {self._dtype} are {between} {_readable(call.module)!r}: {bad} of "
            f"{count}{largest}"
        )


def _numbers(values: Any) -> list[torch.Tensor]:
    """The floating-point tensors within nested tuples, lists and model outputs."""
    if isinstance(values, torch.Tensor):
        return [values] if values.is_floating_point() else []
    if isinstance(values, dict):
        values = tuple(values.values())
    return [t for value in values for t in _numbers(value)] if isinstance(values, tuple | list) else []


def _finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def _readable(name: str) -> str:
    """A parameter's compute-dtype copy under the parameter's own name (`quant.layers.compute_copy.detach_copy`)."""
    return re.sub(r"\.?parametrizations\.(\w+)\.0$", r".\1", name) or "the model"


def _remedy(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return f"float16 ends at {torch.finfo(dtype).max:.0f}: {WIDER_THAN_FLOAT16}"
    return (
        f"{short_name(dtype)} has a range of 3e38, so the policy itself has diverged or its weights are damaged: "
        "resume from an earlier checkpoint with a lower learner.optimizer.lr or learner.optimizer.grad_clip"
    )
