"""vLLM's operators with gradients: the value is the engine's own call, to the bit, the gradient
that of its formula.

Any `CustomOp` of vLLM's has a `forward_native` in torch's operators beside the kernels it may run.
The backward repeats that in fp32 under autograd, on what went in. Norms, rotary embeddings and
SiLU's gate, which every layer has, have backwards written out, of fewer passes over memory.

Inputs are kept, which their producers often keep anyway, and nothing else. Gradients are computed
in fp32 and rounded once to the dtype of what they belong to; how, the `Gradients` of the model
know.

Axes: N tokens, C columns, H heads, D head size.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from qarl.quant.layers.compute_copy import MasterCopy
from qarl.quant.layers.gradients import Gradients
from qarl.quant.runtime.replaced import replaced

_BLOCK = 1 << 17
"""Elements of the largest input that the generic backward takes at once."""


class Operator:
    """One of vLLM's operators in the graph. module: a `CustomOp`. weights: of its parameters, by
    their names in it.
    """

    def __init__(self, module: Any, weights: Mapping[str, MasterCopy], gradients: Gradients):
        self.module, self.weights, self.gradients = module, weights, gradients
        self.method: Callable[..., Any] = module._forward_method
        native = getattr(type(module), "forward_native", None)
        self.is_native = getattr(self.method, "__func__", None) is native
        self.native: Callable[..., Any] = getattr(module, "forward_native", module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own method."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        derived = torch.is_grad_enabled() and (
            self.weights or any(t.requires_grad for t in tensors)
        )
        if not derived:
            return self.method(*args, **kwargs)
        written = _written_out(self)
        if written is not None and not kwargs:
            return written.apply(
                self, *args, *(weight.routed() for weight in self.weights.values())
            )
        call = _Call(self, spec, leaves, len(tensors))
        outputs = _Derived.apply(
            call, *tensors, *(weight.routed() for weight in self.weights.values())
        )
        return pytree.tree_unflatten(list(outputs), call.returned)

    def value(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's, on copies of what its kernels may write into."""
        if not self.is_native or any(
            t.is_cuda for t in pytree.tree_leaves(args) if isinstance(t, Tensor)
        ):
            args, kwargs = pytree.tree_map_only(
                Tensor,
                lambda t: t.clone(memory_format=torch.contiguous_format),
                (args, kwargs),
            )
        return self.method(*args, **kwargs)


def _written_out(operator: Operator) -> Any:
    """The backward that is written out for it; None where autograd goes through its native form."""
    kind, method = type(operator.module), getattr(operator.method, "__func__", None)
    if (
        kind in (RMSNorm, GemmaRMSNorm)
        and getattr(operator.module, "variance_size_override", None) is None
    ):
        return _Norm
    if kind is SiluAndMul:
        return _Gate
    turns = {
        getattr(RotaryEmbedding, name) for name in ("forward_cpu", "forward_cuda", "forward_native")
    }
    return _Rotation if isinstance(operator.module, RotaryEmbedding) and method in turns else None


class _Norm(torch.autograd.Function):
    """x / rms(x) · weight, of a sum with a residual where there is one. Kept: what is normalized;
    of a sum, the rounded one that is passed on, on CPUs too, where the norm is of the unrounded.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, x: Tensor, *rest: Tensor) -> Any:
        """x: compute dtype [..., C]; rest: the residual, of its shape, if any, and the weight [C],
        if it has one.
        """
        count = len(rest) - len(operator.weights)
        ctx.operator, ctx.added = operator, count > 0
        y = operator.value(x.detach(), *(residual.detach() for residual in rest[:count]))
        ctx.save_for_backward(y[1] if ctx.added else x, *rest[count:])
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """See `_norm_gradients`. The sum's gradient is that of both its parts."""
        operator: Operator = ctx.operator
        x, *weight = ctx.saved_tensors
        scale = None
        if weight:
            scale = weight[0].detach().float() + (
                1.0 if type(operator.module) is GemmaRMSNorm else 0.0
            )
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = [t.flatten(0, -2) for t in (dx, grad_outputs[0], x, *grad_outputs[1:])]
        parts = operator.gradients.over_rows(
            _norm_gradients, rows, scale, operator.module.variance_epsilon
        )
        dweight = [functools.reduce(torch.add, parts).to(weight[0].dtype)] if weight else []
        return None, dx, *([dx] if ctx.added else []), *dweight


def _norm_gradients(
    dx: Tensor, dy: Tensor, x: Tensor, *rest: Tensor | float | None
) -> Tensor | None:
    """rest: the gradient of x as such, [N, C], where x is a sum passed on; the weight, fp32 [C] or
    None; epsilon.

    With n = x / rms(x): dn = dy · weight, dx = (dn - n · mean(dn · n)) / rms(x). Returns dweight =
    Σ dy · n.
    """
    *of_sum, scale, epsilon = rest
    fp32, dnormal = x.float(), dy.float()
    inverse = torch.rsqrt(fp32.pow(2).mean(-1, keepdim=True) + epsilon)  # type: ignore[operator]
    normal = fp32 * inverse
    dweight = None if scale is None else (dnormal * normal).sum(0)
    if scale is not None:
        dnormal = dnormal * scale
    mean = (dnormal * normal).mean(-1, keepdim=True)
    dtotal = dnormal.addcmul(normal, mean, value=-1.0).mul_(inverse)
    dx.copy_(dtotal.add_(of_sum[0]) if of_sum else dtotal)  # type: ignore[arg-type]
    return dweight


class _Rotation(torch.autograd.Function):
    """Rotary embedding of queries and keys. Backward: the engine's rotation by the negatives, in
    fp32, rounded once.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, positions: Tensor, *turned: Tensor | None) -> Any:
        """positions: int64 [N]; turned: queries [N, H · D] and keys, or queries alone → the
        same.
        """
        ctx.operator = operator
        ctx.save_for_backward(positions)
        return operator.value(positions, *(t if t is None else t.detach() for t in turned))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """The transposed rotation."""
        (positions,), operator = ctx.saved_tensors, ctx.operator
        back = [
            g if g is None else g.clone(memory_format=torch.contiguous_format) for g in grad_outputs
        ]
        with _turned_back(operator.module):
            gradients = operator.method(positions, *back)
        return None, None, *gradients[: len(grad_outputs)]


def _turned_back(rotary: Any) -> contextlib.AbstractContextManager[None]:
    """Within this context the operator turns by negative angles."""
    cos, sin = rotary.cos_sin_cache.chunk(2, dim=-1)
    return replaced(rotary, cos_sin_cache=torch.cat((cos, -sin), dim=-1))


class _Gate(torch.autograd.Function):
    """silu(gate) · up, each rounded to the compute dtype. Kept: both."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, x: Tensor) -> Tensor:
        """x: gate and up, compute dtype [..., 2C] → [..., C]."""
        ctx.operator = operator
        ctx.save_for_backward(x)
        return operator.value(x.detach())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """See `_gate_gradients`."""
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = [t.flatten(0, -2) for t in (dx, grad_outputs[0], x)]
        ctx.operator.gradients.over_rows(_gate_gradients, rows)
        return None, dx


def _gate_gradients(dx: Tensor, dy: Tensor, x: Tensor) -> None:
    """SiLU's derivative by the operator autograd would call."""
    (dgate, dup), (gate, up) = dx.chunk(2, dim=-1), x.chunk(2, dim=-1)
    dup.copy_(dy * torch.nn.functional.silu(gate))
    dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))


class _Call:
    """One call of an operator: how its arguments were nested, and what it returned is."""

    def __init__(self, operator: Operator, spec: Any, leaves: Sequence[Any], tensors: int):
        self.operator, self.spec, self.tensors = operator, spec, tensors
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.returned: Any = None

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with these for the tensors among them."""
        rest = iter(tensors)
        leaves = [next(rest) if t else o for t, o in zip(self.is_tensor, self.others, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


class _Derived(torch.autograd.Function):
    """An operator, and autograd through its native form. Kept: the tensors among its arguments."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """tensors: of the arguments, then weights in the operator's order."""
        args, kwargs = call.arguments([t.detach() for t in tensors[: call.tensors]])
        outputs, call.returned = pytree.tree_flatten(call.operator.value(*args, **kwargs))
        ctx.save_for_backward(*tensors)
        ctx.call = call
        passed = {t.data_ptr() for t in tensors}
        return tuple(o.clone() if o is not None and o.data_ptr() in passed else o for o in outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        """In fp32, a block of tokens at a time where all tensors have a row a token."""
        call: _Call = ctx.call
        operator, tensors = call.operator, ctx.saved_tensors
        inputs, weights = tensors[: call.tensors], tensors[call.tensors :]
        needed = ctx.needs_input_grad[1 : 1 + call.tensors]
        fp32 = {
            n: w.detach().float().requires_grad_()
            for n, w in zip(operator.weights, weights, strict=True)
        }
        dweights = [torch.zeros_like(w) for w in fp32.values()]
        dinputs = [
            torch.zeros_like(t) if need else None for t, need in zip(inputs, needed, strict=True)
        ]
        with torch.enable_grad(), _natively(), _reading(operator.module, fp32):
            for rows in _blocks(inputs):
                part = [
                    t.detach()[rows].float() if t.is_floating_point() else t[rows] for t in inputs
                ]
                part = [
                    t.requires_grad_() if need else t for t, need in zip(part, needed, strict=True)
                ]
                args, kwargs = call.arguments(part)
                outputs = pytree.tree_leaves(operator.native(*args, **kwargs))
                pairs = [
                    (o, g[rows].to(o.dtype))
                    for o, g in zip(outputs, grad_outputs, strict=True)
                    if g is not None and o.requires_grad
                ]
                wanted = [t for t, need in zip(part, needed, strict=True) if need] + list(
                    fp32.values()
                )
                outs, grads = zip(*pairs, strict=True)
                gradients = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
                for into in (d for d in dinputs if d is not None):
                    gradient = next(gradients)
                    if gradient is not None:
                        into[rows] = gradient.to(into.dtype)
                for total, gradient in zip(dweights, gradients, strict=True):
                    if gradient is not None:
                        total += gradient
        return (
            None,
            *dinputs,
            *(d.to(w.dtype) for d, w in zip(dweights, weights, strict=True)),
        )


def _blocks(tensors: Sequence[Tensor]) -> Iterator[slice | Any]:
    """Slices of rows; everything at once where tensors differ in rows."""
    count = {len(t) if t.ndim else -1 for t in tensors}
    if len(count) != 1 or -1 in count:
        yield ...
        return
    (rows,) = count
    size = max(1, _BLOCK // max(1, max(t.numel() // max(1, rows) for t in tensors)))
    for start in range(0, rows, size):
        yield slice(start, start + size)


class _Read(Tensor):
    """A weight of which `.data` does not leave autograd: vLLM's norms read `self.weight.data`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = property(lambda self: self)  # type: ignore[assignment]


@contextlib.contextmanager
def _reading(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context the module has these for its weights, and fp32 buffers."""
    before, buffers = {name: module.__dict__.get(name) for name in weights}, []
    for name, weight in weights.items():
        module.__dict__[name] = weight.as_subclass(_Read)
    for part in module.modules():
        buffers.append((part, dict(part._buffers)))
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.float()
    try:
        yield
    finally:
        module.__dict__.update(before)
        for part, kept in buffers:
            part._buffers.update(kept)


@contextlib.contextmanager
def _natively() -> Iterator[None]:
    """Within this context vLLM's operators are torch's, uncompiled, and not wrapped in what
    autograd cannot follow.
    """
    with (
        ir.enable_torch_wrap(False),
        torch.compiler.set_stance("force_eager"),
        contextlib.ExitStack() as stack,
    ):
        for operator in ir.op.IrOp.registry.values():
            stack.enter_context(operator.set_priority(["native"]))
        yield
