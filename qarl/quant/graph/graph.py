"""The learner's forward through vLLM's own model.

`Graph` puts leaves into a skeleton: products of low-bit layers in place of vLLM's linear layers,
copies of masters in place of other weights, operators and attention with gradients. Everything
between them is vLLM's. Sequences are packed: one row of N tokens holds one after the other, and
attention stays within each.

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
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from qarl.configs.errors import GraphError
from qarl.quant.graph.attention import attention
from qarl.quant.graph.convolution import ShortConvolution
from qarl.quant.graph.delta_net import DeltaNet
from qarl.quant.graph.experts import RoutedLayer
from qarl.quant.graph.kinds import (
    is_convolution,
    is_delta_net,
    is_latent_attention,
    is_mamba2,
    is_short_convolution,
    keeps_state,
)
from qarl.quant.graph.latent import LatentAttention
from qarl.quant.graph.mamba2 import Mamba2
from qarl.quant.graph.operators import Operator
from qarl.quant.graph.packing import PictureRows, Sequences
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.graph.skeleton import Skeleton
from qarl.quant.kernels.base import KernelError, Scoring
from qarl.quant.kernels.cpu_attention import sees_pictures_whole
from qarl.quant.kernels.engine_layers import operator_kind, without_towers
from qarl.quant.layers.compute_copy import MasterCopy
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.stack import LinearStack
from qarl.quant.runtime.replaced import replaced


@dataclass(frozen=True, kw_only=True)
class Masters:
    """The layers and tensors that a graph multiplies and reads, by vLLM's names."""

    stacks: Mapping[str, LinearStack]
    """Linear layers and output head."""
    experts: Mapping[str, RoutedLowBitExperts]
    """Experts of each `MoERunner`."""
    weights: Mapping[tuple[str, str], MasterCopy]
    """(module, parameter) → copy, for every other parameter."""
    buffers: Mapping[tuple[str, str], torch.Tensor]
    """(module, parameter) → tensor that is not trained."""
    padding: int = -1
    """Token of the input embedding whose row gets no gradient; -1 for none."""


@dataclass
class _Step:
    """State of one forward."""

    sequences: Sequences
    """The sequences of the row of tokens."""
    experts: torch.Tensor | None
    """Experts to route to, integer [N, L, K], or None; see `Graph.hidden`."""
    keys: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """vLLM's name of a layer → its keys and values, for later layers that share them."""


class Graph:
    """vLLM's model, differentiable down to the masters.

    Raises `GraphError` for a layer that vLLM leaves unquantized although the plan quantizes it.

    Args:
        skeleton: vLLM's model, only with modules of known kinds (`quant.graph.kinds`). They get
            leaves for good.
        masters: layers and tensors to install.
        context: settings and state that the layers share.
        log: receives the routers' logits.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        masters: Masters,
        context: LayerContext,
        log: RouterLog,
    ):
        self.skeleton = skeleton
        self.module = skeleton.module
        self._masters = masters
        self._context = context
        self._log = log
        self.delta_nets = any(map(is_delta_net, self.module.modules()))
        """Whether the model has gated delta nets, whose kernels have bfloat16 alone."""
        self.keeps_states = any(map(keeps_state, self.module.modules()))
        """Whether the model has these or other layers that need `Sequences.prefilled`."""
        self._step: _Step | None = None
        """The forward that is running, None outside."""
        self._read_directly: list[tuple[nn.Module, str, MasterCopy]] = []
        """(module, attribute, copy) of weights that a module's Python reads as tensors."""
        self._routed: list[RoutedLayer] = []
        self._shared = {
            m.kv_sharing_target_layer_name
            for m in self.module.modules()
            if isinstance(m, Attention)
        }
        """vLLM's names of layers whose keys and values other layers read."""
        named = (
            (m, key, p)
            for m in self.module.modules()
            for key, p in m._parameters.items()
            if p is not None
        )
        self._owners = {id(parameter): (module, key) for module, key, parameter in named}
        """id of a parameter → the module and attribute that hold it."""
        self._names = {id(module): name for name, module in self.module.named_modules()}
        """id of a module → its name."""
        for name, module in list(without_towers(self.module)):
            self._put_leaf(name, module)
        _drop_no_grad(self.module)
        self._checkpoint_layers()

    def hidden(
        self,
        tokens: torch.Tensor,
        sequences: Sequences,
        experts: torch.Tensor | None = None,
        pictures: PictureRows | None = None,
    ) -> torch.Tensor:
        """Return the hidden states that the output head is given, compute dtype [N, C].

        Args:
            tokens: int64 [N].
            sequences: the sequences of the row.
            experts: experts to route to, integer [N, L, K] over decoder layers; -1 where the router
                chooses. None: it chooses everywhere.
            pictures: what stands in place of the embeddings of some tokens. No gradient flows into
                it, nor into the embeddings of these tokens. None: all tokens are text.
        """
        if experts is not None and not self._routed:
            raise GraphError(
                "the engine's expert choices were given, and this model has no experts to route to"
            )
        for module, key, weight in self._read_directly:
            module.__dict__[key] = weight.routed() if torch.is_grad_enabled() else weight.read
        if pictures is not None and pictures.sees is not None:
            sequences = replace(sequences, sees=pictures.sees)
        with self._stepping(_Step(sequences, experts)), self._log.one_forward():
            positions = self._positions(sequences, tokens.device, pictures)
            if pictures is None or not pictures.any:
                output = self.module(tokens, positions)
            else:
                with _deepstack(self.module, pictures.rows):
                    embedded = self.module.embed_input_ids(  # type: ignore[operator]
                        tokens,
                        multimodal_embeddings=[pictures.in_order],
                        is_multimodal=pictures.is_picture,
                    )
                    output = self.module(None, positions, inputs_embeds=embedded)
        return output[0] if isinstance(output, tuple) else output

    def _positions(
        self, sequences: Sequences, device: torch.device, pictures: PictureRows | None
    ) -> torch.Tensor:
        """Return each token's position, int64 [N]; of models that place pictures on three axes one
        row for each, [3, N]. The three are equal for text, as vLLM has them.
        """
        if pictures is not None and pictures.positions is not None:
            return pictures.positions.T.contiguous()
        positions = sequences.positions(device)
        places_pictures = self.skeleton.config.model_config.uses_mrope
        return positions.expand(3, -1) if places_pictures else positions

    def require_same(self, kinds: Mapping[str, str]) -> None:
        """Raise `KernelError` if the running engine's modules differ from these.

        kinds: kinds of the engine's modules, by name (`quant.kernels.engine_layers`).
        """
        ours = {name: operator_kind(module) for name, module in without_towers(self.module)}
        for name in sorted(ours.keys() | kinds.keys()):
            if ours.get(name) != kinds.get(name):
                raise KernelError(
                    f"the engine has {kinds.get(name, 'no module')} at {name!r}, and the learner's"
                    f" model of it {ours.get(name, 'no module')}"
                )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, compute dtype [n, V], of hidden states in the compute dtype, [n, C]."""
        with self.skeleton.running(len(hidden)):
            return self.module.compute_logits(hidden)  # type: ignore[operator]

    @contextlib.contextmanager
    def _stepping(self, step: _Step) -> Iterator[None]:
        """Run one forward of the model within this context."""
        for layer in self._routed:
            layer.replayed = None if step.experts is None else step.experts[:, layer.number]
        with (
            replaced(self, _step=step),
            self.skeleton.running(sum(step.sequences.lengths)),
        ):
            yield

    def _put_leaf(self, name: str, module: Any) -> None:
        """Replace what a module of vLLM's computes, if there is a leaf for its kind."""
        self._take_buffers(name, module)
        if is_convolution(module):
            return  # the module that it is a part of reads its weight
        if is_delta_net(module):
            weights = self._weights(name, module)
            weights["conv1d"] = self._masters.weights[f"{name}.conv1d", "weight"]
            module._forward_method = DeltaNet(module, weights, self._sequences)
        elif is_short_convolution(module):
            weights = self._of_child(name, "conv")
            module.forward = ShortConvolution(module, weights, self._sequences)
        elif is_mamba2(module):
            weights = self._weights(name, module) | self._of_child(name, "conv1d")
            module.forward = Mamba2(module, weights, self._sequences)
        elif isinstance(module, LinearBase):
            stack = self._stack(name, module)
            _without_parameters(module)
            method: Any = _LowBitMethod(stack)
            module.quant_method = method
            if isinstance(module, GateLinear):
                module.forward = _gate(module, stack)
        elif isinstance(module, VocabParallelEmbedding):
            weight = self._masters.weights.get((name, "weight"))
            _without_parameters(module)
            method = _LowBitMethod(self._masters.stacks.get(name), weight, self._masters.padding)
            module.quant_method = method
        elif isinstance(module, Attention):
            module.forward = self._attention(name, module)
        elif is_latent_attention(module):
            module.forward = self._latent_attention(module)
        elif isinstance(module, MoERunner):
            self._routed.append(RoutedLayer(module, self._masters.experts[name], self._log))
        elif isinstance(module, RoutedExperts):
            _without_parameters(module)
        elif isinstance(module, CustomOp) and _dispatches(module):
            weights = self._weights(name, module)
            module._forward_method = Operator(module, weights, self._context.gradients)
        else:
            for key, weight in self._weights(name, module).items():
                self._read_directly.append((module, key, weight))

    def _latent_attention(self, module: MLAAttention) -> LatentAttention:
        """Return the leaf of latent attention."""
        if self._context.kv_cache is not None:
            raise GraphError(
                f"quantization.kv_cache {self._context.kv_cache!r} with latent attention, for"
                " which vLLM has no such cache on CPUs; omit it"
            )
        stack = self._masters.stacks[self._names[id(module.kv_b_proj)]]
        return LatentAttention(module, stack, self._sequences)

    def _stack(self, name: str, module: LinearBase) -> LinearStack:
        """Return the stack that replaces a linear layer."""
        stack = self._masters.stacks[name]
        scheme = stack.parts[0].scheme
        unquantized = isinstance(module.quant_method, UnquantizedLinearMethod)
        if self.skeleton.config.quant_config and scheme.quantization and unquantized:
            raise GraphError(
                f"{stack.parts[0].layer!r} would be in {scheme.name!r}, and vLLM multiplies it"
                " unquantized; put a rule before the others that leaves it alone"
                f" ('{stack.parts[0].layer}=bf16')"
            )
        return stack

    def _take_buffers(self, name: str, module: nn.Module) -> None:
        """Copy tensors that the checkpoint has and nobody trains into the module's own tensors.

        The module's tensors remain the same objects, because other modules may hold them too. A
        model on the meta device, which only asks whether it can be built, has no values to copy.
        """
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            buffer = self._masters.buffers.get((name, key))
            if tensor is not None and buffer is not None and not buffer.is_meta:
                tensor.data.copy_(buffer.reshape(tensor.shape))

    def _weights(self, name: str, module: nn.Module) -> dict[str, MasterCopy]:
        """Replace a module's own parameters by copies of masters and return these, by name.

        The module reads them from now on instead of the tensors that it was built with.
        """
        weights = {}
        for tensors in (module._parameters, module._buffers):
            for key, tensor in list(tensors.items()):
                if tensor is None or (name, key) in self._masters.buffers:
                    continue
                if (name, key) in self._masters.weights:
                    weights[key] = self._masters.weights[name, key]
                    read = weights[key].read
                    if (read.dtype, read.device) == (tensor.dtype, tensor.device):
                        # a router or an attention may hold the old tensor
                        tensor.data = read
                    del tensors[key]
                    module.__dict__[key] = read
        return weights

    def _of_child(self, name: str, child: str) -> dict[str, MasterCopy]:
        """Return the copies of the parameters of a module's child, by their names in the module."""
        return {
            f"{child}.{key}": copy
            for (module, key), copy in self._masters.weights.items()
            if module == f"{name}.{child}"
        }

    def _attention(self, name: str, module: Any) -> Callable[..., torch.Tensor]:
        """Return the forward that replaces an `Attention` module's."""
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
        shared = module.kv_sharing_target_layer_name
        own_name = str(module.layer_name)
        layers = [m for m in self.module.modules() if isinstance(m, Attention)]
        whole = sees_pictures_whole(module, layers)
        # Sinks are a parameter of another module, into which `hidden` puts the trained copy.
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
                # Only these, because the step keeps them until the end of the backward.
                if own_name in self._shared:
                    self._step.keys[own_name] = k, v
            sinks = None if owner is None else getattr(*owner)
            now = published if self._context.multiplies_codes else scoring
            sequences = self._step.sequences
            if not whole and sequences.sees is not None:
                sequences = replace(sequences, sees=None)
            return attention(q, k, v, sinks, now, sequences).flatten(1)

        return attend

    def _sequences(self) -> Sequences:
        """Return the sequences of the forward that is running."""
        assert self._step is not None
        return self._step.sequences

    @property
    def decoder_layers(self) -> list[Any]:
        """vLLM's decoder layers, in their order; [] if attention is in no list of modules."""
        lists = (m for m in self.module.modules() if isinstance(m, nn.ModuleList))
        return next(
            (
                list(m)
                for m in lists
                if any(isinstance(part, Attention | MLAAttention) for part in m.modules())
            ),
            [],
        )

    def _checkpoint_layers(self) -> None:
        """Make decoder layers keep only their input while `context.checkpointing` is set."""
        for layer in self.decoder_layers:
            layer.forward = self._checkpointed(layer.forward)

    def _checkpointed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a decoder layer's forward that can be checkpointed."""

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

            # Nothing here is random, so no RNG state is saved. Running it again gives the same
            # bits, because codes and kernels stay those of one weight version.
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run


def _deepstack(module: Any, rows: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context within which vLLM's model adds a tower's outputs in its first layers, too.

    Qwen3-VL's tower has one output for each of these layers (deepstack). The class of the whole
    takes them apart, and adds them, only if it was built with the tower. Other models' towers have
    one output for all.

    rows: the tower's outputs side by side, those for the embeddings first, [P, n · C].
    """
    if not hasattr(module, "_compute_deepstack_embeds") or rows.shape[1] == module.visual_dim:
        return contextlib.nullcontext()
    levels = rows.shape[1] // module.visual_dim - 1
    return replaced(
        module,
        use_deepstack=True,
        deepstack_num_level=levels,
        multiscale_dim=module.visual_dim * levels,
        deepstack_input_embeds=[rows.new_zeros(0, module.visual_dim)] * levels,
        deepstack_input_embeds_num_tokens=0,
    )


class _LowBitMethod:
    """Replacement of a layer's `quant_method` that multiplies by a stack or looks up in a copy."""

    def __init__(
        self,
        stack: LinearStack | None,
        weight: MasterCopy | None = None,
        padding: int = -1,
    ):
        self._stack = stack
        self._weight = weight
        self._padding = padding

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the product with x, bias included: compute dtype [..., I] → [..., O]."""
        assert self._stack is not None, (
            f"{type(layer).__name__} multiplies, and has no low-bit layer"
        )
        return self._stack(x)

    def embedding(self, layer: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings: int64 → compute dtype [..., C]."""
        assert self._weight is not None, f"{type(layer).__name__} looks up, and has no copy"
        return self._weight.looked_up(tokens, self._padding)


def _gate(module: Any, stack: LinearStack) -> Callable[..., Any]:
    """Return a router's forward through its stack.

    vLLM's own chooses among kernels before it asks the `quant_method`.
    """

    def forward(x: torch.Tensor) -> Any:
        y = stack(x)
        y = y if module.out_dtype is None else y.to(module.out_dtype)
        return (y, None) if module.return_bias else y

    return forward


def _dispatches(operator: CustomOp) -> bool:
    """Return whether an operator's forward is vLLM's dispatch, or ends in it.

    MiniMax's norms have Python of their own instead, and no native method for the dispatch. The
    norms of vLLM's Transformers backend have a forward that ends in the dispatch.
    """
    kind = type(operator)
    return kind.forward is CustomOp.forward or kind.forward_native is not CustomOp.forward_native


def _without_parameters(module: nn.Module) -> None:
    """Free a module's matrices, and keep their shapes and dtypes on the meta device for readers."""
    for key, parameter in list(module._parameters.items()):
        if parameter is not None and (parameter.ndim > 1 or key == "bias" or "weight" in key):
            del module._parameters[key]
            module.__dict__[key] = torch.empty_like(parameter.data, device="meta")


def _drop_no_grad(model: nn.Module) -> None:
    """Unwrap the forwards of modules that have `torch.no_grad` around them."""
    for module in model.modules():
        forward = type(module).forward
        if "forward" not in module.__dict__ and forward.__code__.co_name == "decorate_context":
            module.forward = inspect.unwrap(forward).__get__(module)  # type: ignore[method-assign]
