"""The learner's forward through vLLM's own model.

`Graph` puts leaves into a skeleton: products of low-bit layers where vLLM has linear layers, copies
of masters where it has other weights, operators and attention with gradients. Everything between
them is vLLM's. Sequences are packed: one row of N tokens holds one after the other, and attention
stays within each.

Axes: N tokens of all sequences, n of those that are asked for, C hidden columns, V vocabulary, K
experts a token, L decoder layers.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from qarl.configs.errors import GraphError
from qarl.quant.graph.attention import attention
from qarl.quant.graph.experts import RoutedLayer
from qarl.quant.graph.operators import Operator
from qarl.quant.graph.packing import Sequences
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.graph.skeleton import Skeleton
from qarl.quant.kernels.base import KernelError, Scoring
from qarl.quant.kernels.engine_layers import operator_kind
from qarl.quant.layers.compute_copy import MasterCopy
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.stack import LinearStack
from qarl.quant.runtime.replaced import replaced


@dataclass(frozen=True, kw_only=True)
class Masters:
    """What a graph multiplies and reads, by vLLM's names. stacks: linear layers and output head.
    experts: of each `MoERunner`. weights: (module, parameter) → every other parameter. buffers:
    (module, parameter) → what is not trained. padding: token of the input embedding whose row is
    not learned, -1 for none.
    """

    stacks: Mapping[str, LinearStack]
    experts: Mapping[str, RoutedLowBitExperts]
    weights: Mapping[tuple[str, str], MasterCopy]
    buffers: Mapping[tuple[str, str], torch.Tensor]
    padding: int = -1


@dataclass
class _Step:
    """One forward. keys: keys and values of its layers, by vLLM's name, for layers that share
    them.
    """

    sequences: Sequences
    experts: torch.Tensor | None
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Graph:
    """vLLM's model, differentiable down to masters. skeleton: whose modules, all of kinds known
    here (`quant.graph.kinds`), get leaves, for good. Raises `GraphError` for a layer that vLLM
    leaves unquantized and the plan does not.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        masters: Masters,
        context: LayerContext,
        log: RouterLog,
    ):
        self.skeleton, self.module = skeleton, skeleton.module
        self._masters, self._context = masters, context
        self._step: _Step | None = None
        self._read_directly: list[tuple[nn.Module, str, MasterCopy]] = []
        self._shared = {
            m.kv_sharing_target_layer_name
            for m in self.module.modules()
            if isinstance(m, Attention)
        }
        self._routed: list[RoutedLayer] = []
        self._log = log
        named = (
            (m, key, p)
            for m in self.module.modules()
            for key, p in m._parameters.items()
            if p is not None
        )
        self._owners = {id(parameter): (module, key) for module, key, parameter in named}
        for name, module in list(self.module.named_modules()):
            self._put_leaf(name, module)
        _drop_no_grad(self.module)
        self._checkpoint_layers()

    def hidden(
        self,
        tokens: torch.Tensor,
        sequences: Sequences,
        experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens: int64 [N]; experts: to route to, integer [N, L, K] over decoder layers, -1 where
        the router is to choose; None lets it choose everywhere. Returns what the output head is
        given, compute dtype [N, C].
        """
        if experts is not None and not self._routed:
            raise GraphError(
                "the engine's expert choices were given, and this model has no experts to route to"
            )
        for module, key, weight in self._read_directly:
            module.__dict__[key] = weight.routed() if torch.is_grad_enabled() else weight.read
        with self._stepping(_Step(sequences, experts)), self._log.one_forward():
            output = self.module(tokens, sequences.positions(tokens.device))
        return output[0] if isinstance(output, tuple) else output

    def require_same(self, kinds: Mapping[str, str]) -> None:
        """Raise `KernelError` where the running engine's modules are others than these. kinds: of
        its modules, by name (`quant.kernels.engine_layers`).
        """
        ours = {name: operator_kind(module) for name, module in self.module.named_modules()}
        for name in sorted(ours.keys() | kinds.keys()):
            if ours.get(name) != kinds.get(name):
                raise KernelError(
                    f"the engine has {kinds.get(name, 'no module')} at {name!r}, and the learner's"
                    f" model of it {ours.get(name, 'no module')}"
                )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: compute dtype [n, C] → logits, compute dtype [n, V]."""
        with self.skeleton.running(len(hidden)):
            return self.module.compute_logits(hidden)  # type: ignore[operator]

    @contextlib.contextmanager
    def _stepping(self, step: _Step) -> Iterator[None]:
        for layer in self._routed:
            layer.replayed = None if step.experts is None else step.experts[:, layer.number]
        with (
            replaced(self, _step=step),
            self.skeleton.running(sum(step.sequences.lengths)),
        ):
            yield

    def _put_leaf(self, name: str, module: Any) -> None:
        self._take_buffers(name, module)
        if isinstance(module, LinearBase):
            stack = self._stack(name, module)
            _without_parameters(module)
            product: Any = _Product(stack)
            module.quant_method = product
            if isinstance(module, GateLinear):
                module.forward = _gate(module, stack)
        elif isinstance(module, VocabParallelEmbedding):
            weight = self._masters.weights.get((name, "weight"))
            _without_parameters(module)
            product = _Product(self._masters.stacks.get(name), weight, self._masters.padding)
            module.quant_method = product
        elif isinstance(module, Attention):
            module.forward = self._attention(name, module)
        elif isinstance(module, MoERunner):
            self._routed.append(RoutedLayer(module, self._masters.experts[name], self._log))
        elif isinstance(module, RoutedExperts):
            _without_parameters(module)
        elif isinstance(module, CustomOp):
            weights = self._weights(name, module)
            module._forward_method = Operator(module, weights, self._context.gradients)
        else:
            for key, weight in self._weights(name, module).items():
                self._read_directly.append((module, key, weight))

    def _stack(self, name: str, module: LinearBase) -> LinearStack:
        stack = self._masters.stacks[name]
        scheme, unquantized = (
            stack.parts[0].scheme,
            isinstance(module.quant_method, UnquantizedLinearMethod),
        )
        if self.skeleton.config.quant_config and scheme.quantization and unquantized:
            raise GraphError(
                f"{stack.parts[0].layer!r} would be in {scheme.name!r}, and vLLM multiplies it"
                " unquantized; put a rule before the others that leaves it alone"
                f" ('{stack.parts[0].layer}=bf16')"
            )
        return stack

    def _take_buffers(self, name: str, module: nn.Module) -> None:
        """Put in what the checkpoint has and nobody trains, into the very tensors that others may
        hold, too.
        """
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (name, key) in self._masters.buffers:
                tensor.data.copy_(self._masters.buffers[name, key].reshape(tensor.shape))

    def _weights(self, name: str, module: nn.Module) -> dict[str, MasterCopy]:
        """Of a module's own parameters, which it reads from now on instead of those it was built
        with.
        """
        weights = {}
        for of_module in (module._parameters, module._buffers):
            for key, tensor in list(of_module.items()):
                if tensor is None or (name, key) in self._masters.buffers:
                    continue
                if (name, key) in self._masters.weights:
                    weights[key] = self._masters.weights[name, key]
                    read = weights[key].read
                    if (read.dtype, read.device) == (tensor.dtype, tensor.device):
                        tensor.data = read  # for who holds it, a router or an attention
                    del of_module[key]
                    module.__dict__[key] = read
        return weights

    def _attention(self, name: str, module: Any) -> Callable[..., torch.Tensor]:
        implementation = module.impl
        window = module.sliding_window
        scoring = Scoring(
            scale=implementation.scale,
            window=window if window and window > 0 else None,
            cap=getattr(implementation, "logits_soft_cap", None) or 0.0,
            slopes=getattr(implementation, "alibi_slopes", None),
        )
        fp8 = self._context.kv_cache == "fp8"
        fp8_queries = fp8 and getattr(implementation, "supports_quant_query_input", False)
        published = replace(scoring, fp8=fp8, fp8_queries=fp8_queries)
        shared, own_name = module.kv_sharing_target_layer_name, str(module.layer_name)
        owner = self._owners.get(id(getattr(implementation, "sinks", None)))

        def attend(
            query: torch.Tensor, key: Any, value: Any, *unused: object, **also: object
        ) -> torch.Tensor:
            assert self._step is not None
            q = query.reshape(-1, module.num_heads, module.head_size)
            if shared is not None:
                k, v = self._step.keys[shared]
            else:
                k, v = (t.reshape(-1, module.num_kv_heads, module.head_size) for t in (key, value))
                # no others: they would be kept to the backward's end
                if own_name in self._shared:
                    self._step.keys[own_name] = k, v
            sinks = None if owner is None else getattr(*owner)
            of_forward = published if self._context.multiplies_codes else scoring
            return attention(q, k, v, sinks, of_forward, self._step.sequences).flatten(1)

        return attend

    def _checkpoint_layers(self) -> None:
        """Let decoder layers keep nothing but their input for the backward, where the context says
        so.
        """
        lists = (m for m in self.module.modules() if isinstance(m, nn.ModuleList))
        layers = next(
            (m for m in lists if any(isinstance(part, Attention) for part in m.modules())),
            (),
        )
        for layer in layers:
            layer.forward = self._checkpointed(layer.forward)

    def _checkpointed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not (self._context.checkpointing and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            step = self._step
            assert step is not None

            def again(*args: Any, **kwargs: Any) -> Any:
                if self._step is step:
                    return forward(*args, **kwargs)
                with self._stepping(step):
                    return forward(*args, **kwargs)

            # Nothing here is random. The output is the same bits: codes and kernels stay those of
            # one weight version.
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run


class _Product:
    """In the place of a layer's `quant_method`: multiplies by its low-bit layers, and looks up in
    its copy.
    """

    def __init__(
        self,
        stack: LinearStack | None,
        weight: MasterCopy | None = None,
        padding: int = -1,
    ):
        self._stack, self._weight, self._padding = stack, weight, padding

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: compute dtype [..., I] → [..., O], the bias of the low-bit layers included."""
        assert self._stack is not None, (
            f"{type(layer).__name__} multiplies, and has no low-bit layer"
        )
        return self._stack(x)

    def embedding(self, layer: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 → compute dtype [..., C]."""
        assert self._weight is not None, f"{type(layer).__name__} looks up, and has no copy"
        return self._weight.looked_up(tokens, self._padding)


def _gate(module: Any, stack: LinearStack) -> Callable[..., Any]:
    """A router's forward, which chooses among kernels before it comes to a `quant_method`."""

    def forward(x: torch.Tensor) -> Any:
        y = stack(x)
        y = y if module.out_dtype is None else y.to(module.out_dtype)
        return (y, None) if module.return_bias else y

    return forward


def _without_parameters(module: nn.Module) -> None:
    """Keep its matrices' shapes and dtypes, in case somebody asks, and none of their memory."""
    for key, parameter in list(module._parameters.items()):
        if parameter is not None and (parameter.ndim > 1 or key == "bias" or "weight" in key):
            del module._parameters[key]
            module.__dict__[key] = torch.empty_like(parameter.data, device="meta")


def _drop_no_grad(model: nn.Module) -> None:
    """Some models have `torch.no_grad` around a forward: take what is inside."""
    for module in model.modules():
        forward = type(module).forward
        if "forward" not in module.__dict__ and forward.__code__.co_name == "decorate_context":
            module.forward = inspect.unwrap(forward).__get__(module)  # type: ignore[method-assign]
