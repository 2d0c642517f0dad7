"""vLLM's operators with gradients.

The forward is the engine's own call, with the engine's bits; the backward is the gradient of its
formula. Any `CustomOp` of vLLM's has a `forward_native` in torch's operators beside the kernels it
may run. The backward repeats that in fp32 under autograd, from the saved inputs. Norms, rotary
embeddings and SiLU's gate, which every layer has, have handwritten backwards with fewer passes over
memory.

Only inputs are saved, which their producers often save anyway. Gradients are computed in fp32 and
rounded once to the dtype of the tensor they belong to. The model's `Gradients` hold the settings.

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
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

from qarl.quant.layers.compute_copy import MasterCopy
from qarl.quant.layers.gradients import Gradients
from qarl.quant.runtime.replaced import replaced

_BLOCK = 1 << 17
"""Number of elements of the largest input that the generic backward processes at once."""


class Operator:
    """One of vLLM's operators in the graph.

    Args:
        module: a `CustomOp`.
        weights: copies of its parameters, by their names in it.
        gradients: the model's settings for gradients.
    """

    def __init__(self, module: Any, weights: Mapping[str, MasterCopy], gradients: Gradients):
        self.module = module
        self.weights = weights
        self.gradients = gradients
        self.method: Callable[..., Any] = module._forward_method
        """The engine's own implementation."""
        native = getattr(type(module), "forward_native", None)
        """The implementation in torch's operators, which autograd can follow."""
        self.is_native = getattr(self.method, "__func__", None) is native
        """True if the engine's own implementation is the native one."""
        self.native: Callable[..., Any] = getattr(module, "forward_native", module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own method returns."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        needs_gradient = torch.is_grad_enabled() and (
            self.weights or any(t.requires_grad for t in tensors)
        )
        if not needs_gradient:
            return self.method(*args, **kwargs)
        weights = [weight.routed() for weight in self.weights.values()]
        handwritten = _written_out(self)
        if handwritten is not None and not kwargs:
            return handwritten.apply(self, *args, *weights)
        call = _Call(self, spec, leaves, len(tensors))
        outputs = _Derived.apply(call, *tensors, *weights)
        return pytree.tree_unflatten(list(outputs), call.returned)

    def value(self, *args: Any, **kwargs: Any) -> Any:
        """Return the engine's result, on copies of inputs that its kernels may overwrite."""
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
        if not self.is_native or any(t.is_cuda for t in tensors):
            args, kwargs = pytree.tree_map_only(
                Tensor,
                lambda t: t.clone(memory_format=torch.contiguous_format),
                (args, kwargs),
            )
        return self.method(*args, **kwargs)


def _written_out(operator: Operator) -> Any:
    """Return the autograd function with a handwritten backward for this operator, or None."""
    kind = type(operator.module)
    method = getattr(operator.method, "__func__", None)
    if (
        kind in (RMSNorm, GemmaRMSNorm)
        and getattr(operator.module, "variance_size_override", None) is None
    ):
        return _Norm
    if kind is SiluAndMul:
        return _Gate
    # Subclasses qualify if they rotate as the base class does.
    rotations = {
        getattr(RotaryEmbedding, name) for name in ("forward_cpu", "forward_cuda", "forward_native")
    }
    if isinstance(operator.module, RotaryEmbedding) and method in rotations:
        return _Rotation
    # It has a factor beside the rotation, in cosines and sines. Models overwrite what it rotates.
    if kind is DeepseekScalingRotaryEmbedding and method is CustomOp.forward_cpu:
        return _Rotation
    return None


class _Norm(torch.autograd.Function):
    """x / rms(x) · weight, where x may be a sum with a residual.

    It saves what is normalized. Of a sum it saves the rounded one that is passed on, on CPUs too,
    where the norm is of the unrounded sum.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, x: Tensor, *rest: Tensor) -> Any:
        """Return the engine's result.

        x: compute dtype [..., C]. rest: the residual of x's shape, if any, then the weight [C], if
        any.
        """
        count = len(rest) - len(operator.weights)
        ctx.operator = operator
        ctx.added = count > 0
        y = operator.value(x.detach(), *(residual.detach() for residual in rest[:count]))
        ctx.save_for_backward(y[1] if ctx.added else x, *rest[count:])
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return gradients of x, residual and weight; see `_norm_gradients`.

        A sum's gradient is that of both its terms.
        """
        operator: Operator = ctx.operator
        x, *weight = ctx.saved_tensors
        scale = None
        if weight:
            # Gemma multiplies by 1 + weight
            offset = 1.0 if type(operator.module) is GemmaRMSNorm else 0.0
            scale = weight[0].detach().float() + offset
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = [t.flatten(0, -2) for t in (dx, grad_outputs[0], x, *grad_outputs[1:])]
        parts = operator.gradients.over_rows(
            _norm_gradients, rows, scale, operator.module.variance_epsilon
        )
        dresidual = [dx] if ctx.added else []
        dweight = [functools.reduce(torch.add, parts).to(weight[0].dtype)] if weight else []
        return None, dx, *dresidual, *dweight


def _norm_gradients(
    dx: Tensor, dy: Tensor, x: Tensor, *rest: Tensor | float | None
) -> Tensor | None:
    """Write the gradient of x into `dx`, and return that of the weight, Σ dy · n, if there is one.

    With n = x / rms(x): dn = dy · weight, dx = (dn - n · mean(dn · n)) / rms(x).

    Args:
        dx: [N, C], overwritten.
        dy: gradient of the result, [N, C].
        x: what is normalized, [N, C].
        rest: the gradient of x itself, [N, C], if x is a sum that is passed on; the weight, fp32
            [C] or None; epsilon.
    """
    *dsum, scale, epsilon = rest
    x_fp32 = x.float()
    dnormal = dy.float()
    inverse = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + epsilon)  # type: ignore[operator]
    normal = x_fp32 * inverse
    dweight = None if scale is None else (dnormal * normal).sum(0)
    if scale is not None:
        dnormal = dnormal * scale
    mean = (dnormal * normal).mean(-1, keepdim=True)
    dtotal = dnormal.addcmul(normal, mean, value=-1.0).mul_(inverse)
    dx.copy_(dtotal.add_(dsum[0]) if dsum else dtotal)  # type: ignore[arg-type]
    return dweight


class _Rotation(torch.autograd.Function):
    """Rotary embedding of queries and keys.

    The backward is the engine's rotation by the negative angles, in fp32, rounded once.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, positions: Tensor, *turned: Tensor | None) -> Any:
        """Return the rotated tensors.

        positions: int64 [N]. turned: queries [N, H · D] and keys, or queries alone.
        """
        ctx.operator = operator
        ctx.save_for_backward(positions)
        return operator.value(positions, *(t if t is None else t.detach() for t in turned))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return the gradients, turned by the transposed rotation."""
        operator = ctx.operator
        (positions,) = ctx.saved_tensors
        in_torch = getattr(operator.method, "__func__", None) is CustomOp.forward_cpu
        # copies, because the engine's kernels rotate in place
        copies = [
            g if g is None else g.to(torch.float32 if in_torch else g.dtype, copy=True).contiguous()
            for g in grad_outputs
        ]
        with _turned_back(operator.module):
            gradients = operator.method(positions, *copies)
        rounded = [
            g if g is None else gradient.to(g.dtype)
            for g, gradient in zip(grad_outputs, gradients, strict=False)
        ]
        return None, None, *rounded


def _turned_back(rotary: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context within which the operator rotates by negative angles."""
    cos, sin = rotary.cos_sin_cache.chunk(2, dim=-1)
    return replaced(rotary, cos_sin_cache=torch.cat((cos, -sin), dim=-1))


class _Gate(torch.autograd.Function):
    """silu(gate) · up, each rounded to the compute dtype. It saves both inputs."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, x: Tensor) -> Tensor:
        """Return the product, [..., C], of gate and up in one tensor, compute dtype [..., 2C]."""
        ctx.operator = operator
        ctx.save_for_backward(x)
        return operator.value(x.detach())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return the gradient of gate and up; see `_gate_gradients`."""
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = [t.flatten(0, -2) for t in (dx, grad_outputs[0], x)]
        ctx.operator.gradients.over_rows(_gate_gradients, rows)
        return None, dx


def _gate_gradients(dx: Tensor, dy: Tensor, x: Tensor) -> None:
    """Write the gradients of gate and up into `dx`, with the operator autograd has for SiLU."""
    dgate, dup = dx.chunk(2, dim=-1)
    gate, up = x.chunk(2, dim=-1)
    dup.copy_(dy * torch.nn.functional.silu(gate))
    dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))


class _Call:
    """One call of an operator: the nesting of its arguments and of its result."""

    def __init__(self, operator: Operator, spec: Any, leaves: Sequence[Any], tensors: int):
        self.operator = operator
        self.spec = spec
        """Nesting of the arguments (pytree)."""
        self.tensors = tensors
        """Number of tensors among the arguments."""
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        """Arguments that are no tensors; None in place of tensors."""
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        """For each argument, True if it is a tensor."""
        self.returned: Any = None
        """Nesting of the result (pytree)."""

    def arguments(
        self,
        tensors: Sequence[Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, with these tensors in place of the originals."""
        rest = iter(tensors)
        leaves = [
            next(rest) if is_tensor else other
            for is_tensor, other in zip(self.is_tensor, self.others, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


class _Derived(torch.autograd.Function):
    """An operator whose backward is autograd through its native form.

    It saves the tensors among its arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return the engine's results.

        tensors: those of the arguments, then weights in the operator's order.
        """
        args, kwargs = call.arguments([t.detach() for t in tensors[: call.tensors]])
        outputs, call.returned = pytree.tree_flatten(call.operator.value(*args, **kwargs))
        ctx.save_for_backward(*tensors)
        ctx.call = call
        # Copy results that are an argument's memory.
        argument_memory = {t.data_ptr() for t in tensors}
        return tuple(
            output.clone()
            if output is not None and output.data_ptr() in argument_memory
            else output
            for output in outputs
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        """Return gradients computed in fp32.

        If all tensors have one row for each token, a block of tokens is computed at a time.
        """
        call: _Call = ctx.call
        operator = call.operator
        tensors = ctx.saved_tensors
        inputs = tensors[: call.tensors]
        weights = tensors[call.tensors :]
        needed = ctx.needs_input_grad[1 : 1 + call.tensors]
        fp32_weights = {
            name: weight.detach().float().requires_grad_()
            for name, weight in zip(operator.weights, weights, strict=True)
        }
        dweights = [torch.zeros_like(weight) for weight in fp32_weights.values()]
        dinputs = [
            torch.zeros_like(t) if need else None for t, need in zip(inputs, needed, strict=True)
        ]
        with torch.enable_grad(), _natively(), _reading(operator.module, fp32_weights):
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
                    (output, grad[rows].to(output.dtype))
                    for output, grad in zip(outputs, grad_outputs, strict=True)
                    if grad is not None and output.requires_grad
                ]
                derived, grads = zip(*pairs, strict=True)
                wanted = [t for t, need in zip(part, needed, strict=True) if need]
                wanted += fp32_weights.values()
                gradients = iter(torch.autograd.grad(derived, wanted, grads, allow_unused=True))
                for dinput in (d for d in dinputs if d is not None):
                    gradient = next(gradients)
                    if gradient is not None:
                        dinput[rows] = gradient.to(dinput.dtype)
                # the rest of the gradients are those of weights
                for total, gradient in zip(dweights, gradients, strict=True):
                    if gradient is not None:
                        total += gradient
        returned = [total.to(w.dtype) for total, w in zip(dweights, weights, strict=True)]
        return None, *dinputs, *returned


def _blocks(tensors: Sequence[Tensor]) -> Iterator[slice | Any]:
    """Yield slices of rows; a single one of everything if tensors differ in number of rows."""
    counts = {len(t) if t.ndim else -1 for t in tensors}
    if len(counts) != 1 or -1 in counts:
        yield ...
        return
    (rows,) = counts
    row_elements = max(t.numel() // max(1, rows) for t in tensors)
    size = max(1, _BLOCK // max(1, row_elements))
    for start in range(0, rows, size):
        yield slice(start, start + size)


class _Read(Tensor):
    """Weight whose `.data` stays in autograd, because vLLM's norms read `self.weight.data`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = property(lambda self: self)  # type: ignore[assignment]


@contextlib.contextmanager
def _reading(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the module these weights and fp32 buffers within this context."""
    before = {name: module.__dict__.get(name) for name in weights}
    buffers = []
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
        for part, part_buffers in buffers:
            part._buffers.update(part_buffers)


@contextlib.contextmanager
def _natively() -> Iterator[None]:
    """Make vLLM's operators torch's own within this context, uncompiled.

    They are not wrapped in anything that autograd cannot follow.
    """
    with (
        ir.enable_torch_wrap(False),
        torch.compiler.set_stance("force_eager"),
        contextlib.ExitStack() as stack,
    ):
        for operator in ir.op.IrOp.registry.values():
            stack.enter_context(operator.set_priority(["native"]))
        yield
