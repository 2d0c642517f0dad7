"""A transformers causal LM over low-bit tensors: master weights in, checkpoint tensors out.

Every parameter has one master. `refresh()` makes a weight version, which forward, publish and
export all read. `quant.model.surgery` replaces the layers; `quant.model.stream` names their tensors
as checkpoints do.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qarl.configs.errors import GraphError
from qarl.configs.schema.run import LayerRule
from qarl.quant.checkpoint.contents import record_tie
from qarl.quant.checkpoint.plan import LayerPlan
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.digest import parameters_digest
from qarl.quant.graph.packing import Packed, Pick, PictureRows, Sequences, known, prefilled_tokens
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.kernels import KernelError
from qarl.quant.layers.context import Forward, LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import materializer
from qarl.quant.materialize.code_changes import FlipCount
from qarl.quant.materialize.scales import checked_together
from qarl.quant.model.ranks import require_ranks
from qarl.quant.model.row_check import RowCheck, check_rows
from qarl.quant.model.stream import checkpoint_tensors, layer_reports
from qarl.quant.model.surgery import replace_layers
from qarl.quant.schemes import Scheme
from qarl.quant.types import LayerReport, LowBitTensor

if TYPE_CHECKING:
    from qarl.quant.graph.graph import Graph
    from qarl.quant.kernels.engine_layers import EngineLayers


class LowBitModel(nn.Module):
    """Causal LM over low-bit layers, whose parameters are the masters.

    Raises the `SchemeError`s of `plan_layers` before anything is changed.

    Args:
        model: transformers causal LM, loaded in the master dtype; its parameters become the
            masters.
        scheme: the main scheme, or the scheme of each layer if `plan_layers` was asked before; it
            then includes `rules`.
        context: settings and state that the layers share.
        operators: "auto", "engine" or "transformers", see `replace_layers`.
        rules: layers in other schemes than `scheme`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: Scheme | LayerPlan,
        context: LayerContext,
        operators: str = "auto",
        rules: Sequence[LayerRule] = (),
    ):
        super().__init__()
        self.plan = scheme if isinstance(scheme, LayerPlan) else plan_layers(model, scheme, rules)
        """The scheme and the shape of each layer."""
        self.context = context
        record_tie(model)
        self.config = model.config
        self.loaded: dict[str, nn.Parameter] = dict(model.named_parameters())
        """Name → every parameter of the loaded model."""
        self.masters: dict[str, nn.Parameter] = dict(self.loaded)
        """Name → parameter that is trained: all of `loaded` until `train_only`."""
        self.adapted: tuple[str, ...] = ()
        """Names of the weights that have an adapter."""
        # checkpoints have no others
        self._persistent_buffers = [
            name for name, _ in model.named_buffers() if name in model.state_dict()
        ]
        self._after_refresh: Callable[[], None] | None = None
        self._layers = replace_layers(model, self.plan, context, operators)
        self.linears: dict[str, LowBitLinear] = self._layers.linears
        """Checkpoint name → low-bit linear layer."""
        self.experts: dict[str, RoutedLowBitExperts] = self._layers.experts
        """Checkpoint name ("model.layers.0.mlp.experts") → low-bit experts."""
        self.operators: str = self._layers.operators
        """Source of the forward's norms, rotary embedding, attention and routing: "engine" or
        "transformers".
        """
        self.why_not_engine: str = self._layers.why_not
        """Reason why the operators are transformers' although "auto" allows the engine's; otherwise
        "".
        """
        self.dtype = context.dtype
        self.gradients = context.gradients
        self.module = model
        # With the engine's operators no module of the model holds the layers. As submodules of this
        # one they are among its parameters.
        if self.operators == "engine":
            self._beside = nn.ModuleList(self.low_bit_layers())
        self.router_log = RouterLog()
        """Logits of the routers."""
        self._graphs: dict[torch.dtype, Graph] = {}
        if context.ranks > 1:
            self.divide_among(context.ranks)
        if self.operators == "transformers":
            self.router_log.watch(model.get_submodule(name) for name in self._layers.routers)
        self.refresh()
        if self.operators == "engine":
            # Build it now, so that a layer without low-bit support in vLLM is refused before
            # anything runs.
            _ = self.graph

    def low_bit_layers(self) -> Iterator[LowBitLinear | RoutedLowBitExperts]:
        """Return all layers that are materialized: linear layers, then experts."""
        return self._layers.low_bit()

    @property
    def device(self) -> torch.device:
        """Device of the masters, on which the forward runs."""
        return next(iter(self.loaded.values())).device

    @torch.no_grad()
    def refresh(self, flips: FlipCount | None = None) -> None:
        """Materialize every master as a new weight version.

        Forwards, publish and export read it. It overwrites the previous version, so tensors of an
        earlier stream (`low_bit_tensors`) change with it.

        Args:
            flips: counts how many codes change, if codes are kept.
        """
        with checked_together():
            for layer in self.low_bit_layers():
                counting = (
                    flips.over(layer.low_bit)
                    if flips and self.context.keeps_codes
                    else contextlib.nullcontext()
                )
                with counting:
                    layer.refresh()
        for copy in self._layers.copies.values():
            copy.refresh()
        if self._after_refresh is not None:
            self._after_refresh()

    def on_refresh(self, call: Callable[[], None] | None) -> None:
        """Set a function to call after each new weight version, before any forward uses it.

        None: no function.
        """
        self._after_refresh = call

    def release_codes(self) -> None:
        """Stop caching codes: recompute them from the masters for every stream and every backward.

        Codes are then made for one layer at a time. All processes must iterate over each stream
        together.
        """
        self.context.drop_codes()
        for layer in self.low_bit_layers():
            layer.release_codes()

    def drop_kernels(self) -> None:
        """Prepare kernels again at every use of a layer.

        Processes that share codes must then run its forwards together.
        """
        self.context.drop_kernels()
        self.release_kernels()

    def multiply_with(self, engine: "EngineLayers | None") -> None:
        """Multiply with the running engine's own layers; None restores this model's own kernels.

        Raises `KernelError`, and keeps this model's own kernels, if the engine lacks a layer of
        this model.
        """
        if engine is not None and self.operators != "engine":
            raise KernelError(
                "transformers' operators multiply each layer alone, and the engine stacks them"
            )
        self.context.multiply_with(engine)
        self.release_kernels()
        if engine is not None:
            try:
                self.layer_reports()  # asks for every layer's kernel
                self.graph.require_same(engine.kinds)
            except KernelError:
                self.multiply_with(None)
                raise

    def divide_among(self, ranks: int) -> None:
        """Multiply and sum as the ranks of a tensor-parallel engine do; 1 for an undivided one.

        Raises `GraphError` if this model has not the engine's operators, and what `require_ranks`
        raises.
        """
        engine = self._layers.engine
        if ranks > 1 and engine is None:
            raise GraphError(
                f"rollout.tensor_parallel_size {ranks} needs vLLM's own model as the learner's,"
                " which sums the ranks' products, and this one computes with transformers'"
                f" operators ({self.why_not_engine or 'learner.operators'}); omit one of them"
            )
        if ranks > 1 and engine is not None:
            config = self.config.get_text_config()
            dtype = self.context.dtype
            require_ranks(ranks, engine, config, self.plan, self.plan.shapes, dtype)
        self.context.divide_among(ranks)
        self.release_kernels()

    def multiplied(self, layer: str, *inputs: Tensor) -> Tensor:
        """Return the output of one layer, by the kernel that this model's forward uses.

        If the layer is in a stack, this is its part of the stack's output.

        Args:
            layer: checkpoint name.
            inputs: arguments of `LowBitLinear.forward` or `RoutedLowBitExperts.forward`.
        """
        if layer in self.experts:
            return self.experts[layer](*inputs)
        for stack in self._layers.stacks.values():
            parts = [part.layer for part in stack.parts]
            if layer in parts:
                rows = [part.out_features for part in stack.parts]
                output = stack(*inputs)[..., : sum(rows)]  # without the engine's padding
                return output.split(rows, dim=-1)[parts.index(layer)]
        return self.linears[layer](*inputs)

    def release_kernels(self) -> None:
        """Free the kernels' own copies of this weight version, which no backward reads."""
        for layer in (*self.low_bit_layers(), *self._layers.stacks.values()):
            layer.release_kernel()

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The output head: compute dtype [n, C] → logits, compute dtype [n, V]."""
        if self.operators == "engine":
            return self.graph.logits
        head = self.module.get_output_embeddings()
        assert head is not None
        return head

    @property
    def graph(self) -> "Graph":
        """The engine's model over these layers, in the dtype of the present forward."""
        try:
            return self._graph_of_forward()
        except AttributeError as error:
            # as such, torch would take it for a missing attribute "graph" of this module
            raise RuntimeError(
                f"the engine's model was not built: AttributeError: {error}"
            ) from error

    def _graph_of_forward(self) -> "Graph":
        """Return the graph in the dtype of the present forward, built at its first use."""
        dtype = self.context.forward_dtype
        engine = self._layers.engine
        if dtype not in self._graphs:
            from qarl.quant.model.engine_model import build_graph

            assert engine is not None
            # The reference also multiplies schemes for which vLLM cannot build a layer on this
            # machine, so its graph is built unquantized.
            quantization = None
            if (
                self.context.kernel_family != "reference"
                and self.context.forward is not Forward.FP32
            ):
                quantization = self.plan.quantization_config(self.context.kv_cache)
            graph = build_graph(
                self.module,
                engine,
                quantization,
                self._layers,
                self.context,
                self.router_log,
            )
            self._graphs[dtype] = graph
        return self._graphs[dtype]

    @contextlib.contextmanager
    def fp32_graph(self) -> "Iterator[Graph]":
        """Build the engine's model over the masters in fp32, unquantized, for this context."""
        cached = self._graphs
        with self.forward_as(Forward.FP32):
            self._graphs = {}
            try:
                yield self.graph
            finally:
                self._graphs = cached

    def hidden(
        self,
        tokens: Tensor,
        wanted: Tensor,
        experts: Tensor | None = None,
        packed: Packed | None = None,
        pictures: PictureRows | None = None,
    ) -> Tensor:
        """Return the hidden states that the output head is given at chosen positions.

        `experts`, `packed` and `pictures` need the engine's operators (else `GraphError`). If
        `router_log` is enabled, it holds [B·T, E] for each layer of experts afterwards ([N, E] if
        packed).

        Args:
            tokens: int64 [B, T], padded on the right.
            wanted: bool [B, T], the chosen positions. Without `packed`, layers with a state
                take their next tokens for the sampled ones (`prefilled_tokens`).
            experts: experts to route to, integer [B, T, L, K] over decoder layers L; -1 where the
                router chooses. None: it chooses everywhere.
            packed: how the sequences are put into one row of N tokens, without padding.
            pictures: a tower's outputs, and the tokens [B, T] in whose places they stand. None: all
                tokens are text.

        Returns compute dtype [n, C], one row for each True of `wanted` in row-major order.
        """
        if self.operators == "engine":
            if packed is None:
                return self._hidden_of_padded(tokens, wanted, experts, pictures)
            experts = None if experts is None else experts[packed.kept]
            in_row = None if pictures is None else pictures.of(packed.kept)
            hidden = self.graph.hidden(tokens[packed.kept], packed.sequences, experts, in_row)
            return Pick.apply(hidden, packed.places[wanted])
        self._refuse_without_engine(experts, packed, pictures)
        with self.router_log.one_forward():
            return self.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state[
                wanted
            ]

    def _hidden_of_padded(
        self,
        tokens: Tensor,
        wanted: Tensor,
        experts: Tensor | None,
        pictures: PictureRows | None,
    ) -> Tensor:
        """Return `hidden` of the engine's graph over sequences with their padding."""
        rows = Sequences.apart([tokens.shape[1]] * len(tokens))
        if self.graph.keeps_states:
            length = torch.full_like(tokens[:, 0], tokens.shape[1])
            prefilled = prefilled_tokens(wanted[:, :-1], length)
            rows = replace(rows, prefilled=known(prefilled.tolist()))
        experts = None if experts is None else experts.flatten(0, 1)
        in_row = None if pictures is None else pictures.of(torch.ones_like(wanted))
        return self.graph.hidden(tokens.flatten(), rows, experts, in_row)[wanted.flatten()]

    @staticmethod
    def _refuse_without_engine(
        experts: Tensor | None, packed: Packed | None, pictures: PictureRows | None
    ) -> None:
        """Raise `GraphError` for arguments of `hidden` that transformers' operators cannot take."""
        if pictures is not None:
            raise GraphError(
                "prompts with pictures need the engine's operators, whose tower made the language"
                " model's inputs, and this model has transformers'; set learner.operators to"
                " 'engine' and rollout.pictures to 0 where the model has none"
            )
        if packed is not None or experts is not None:
            needing = (
                "packed sequences need"
                if packed is not None
                else "replaying the engine's expert choices needs"
            )
            raise GraphError(
                f"{needing} the engine's operators, and this model has transformers'; leave"
                " sequences padded (learner.packing false) and rollout.router_replay false, or set"
                " learner.operators to 'engine'"
            )

    def set_gradient_checkpointing(self, checkpointing: bool) -> None:
        """Set whether only every decoder layer's input is kept between forward and backward.

        Raises `ValueError` if transformers cannot do so for this model.
        """
        if self.operators == "engine":
            self.context.set_checkpointing(checkpointing)
            return
        if checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.module.gradient_checkpointing_disable()
        for layer in self.module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                # transformers checkpoints a layer only in training mode; its modules stay in eval
                layer.training = checkpointing

    @contextlib.contextmanager
    def forward_as(self, forward: Forward) -> Iterator[None]:
        """Multiply other values of the weights within this context, without gradient.

        The values are those of the last `refresh`. `Forward.PUBLISHED` multiplies the published
        codes even if the learner is unaligned, as the canary does; `Forward.UNQUANTIZED` multiplies
        no codes even if it is aligned.
        """
        recasts = forward is Forward.UNQUANTIZED and not self.context.aligned
        try:
            with self.context.forward_as(forward):
                if recasts:
                    self._recast()
                yield
        finally:
            if not self.context.aligned:
                self.release_kernels()
            if recasts:
                self._recast()

    def _recast(self) -> None:
        """Cast all layers' masters again, to the dtype of the present forward."""
        for layer in self.low_bit_layers():
            layer.recast()

    def low_bit_tensors(self) -> Iterator[LowBitTensor]:
        """Yield every tensor of the deployable checkpoint, layer by layer, by its checkpoint name.

        Tied output heads are left out, as transformers leaves them out. Nothing is copied: these
        are the buffers that the next `refresh` overwrites, so read them before it. After
        `release_codes` each layer's tensors are freed once they have been used.
        """
        buffers = ((name, self.module.get_buffer(name)) for name in self._persistent_buffers)
        return checkpoint_tensors(self._layers, self.loaded, buffers)

    def loaded_state(self) -> dict[str, Tensor]:
        """Return every loaded parameter and every persistent buffer, under transformers' names.

        A tied output head is not among them. Nothing is copied.
        """
        parameters = {name: parameter.detach() for name, parameter in self.loaded.items()}
        buffers = {name: self.module.get_buffer(name) for name in self._persistent_buffers}
        return {**parameters, **buffers}

    def layer_reports(self) -> list[LayerReport]:
        """Return the learner's part of the audit: each layer with the kernel that multiplies it."""
        return layer_reports(self._layers, self.context)

    def check_rows(self) -> RowCheck:
        """Test whether every distinct kernel computes a row the same, whatever rows are beside it.

        See `quant.model.row_check`.
        """
        graph = self.graph if self.operators == "engine" else None
        return check_rows(self._layers, self.context, graph)

    def materializers(self) -> dict[str, str]:
        """Return, for each scheme in use, the name of the code that makes its low-bit tensors here.

        See `quant.materialize.materializer`.
        """
        schemes = {layer.scheme.name: layer.scheme for layer in self.low_bit_layers()}
        dtype = next(iter(self.loaded.values())).dtype
        return {
            name: str(materializer(scheme, dtype, self.device)) for name, scheme in schemes.items()
        }

    def matrices(self) -> set[str]:
        """Return the names of the masters that are matrices of the decoder.

        These are the weights of linear layers and experts, without routers and output head. If the
        model has adapters, these are their factors instead.
        """
        if self.adapted:
            return set(self.masters)
        outside = {
            self._layers.family.checkpoint_name("lm_head"),
            *map(self._layers.family.checkpoint_name, self._layers.routers),
        }
        layers = [layer for layer in self.low_bit_layers() if layer.layer not in outside]
        inside = {id(master) for layer in layers for master in layer.masters}
        return {name for name, master in self.masters.items() if id(master) in inside}

    def train_only(
        self,
        masters: Mapping[str, nn.Parameter],
        adapted: Sequence[str],
    ) -> None:
        """Freeze the loaded parameters and train `masters` instead.

        Args:
            masters: the factors of adapters, by name.
            adapted: names of the weights that have an adapter.
        """
        for parameter in (*self.loaded.values(), *self.parameters()):
            parameter.requires_grad_(False)
        for master in masters.values():
            master.requires_grad_(True)
        self.masters = dict(masters)
        self.adapted = tuple(adapted)

    @functools.cached_property
    def base_digest(self) -> str | None:
        """Digest of the frozen weights under adapters, which checkpoints of adapters leave out.

        None without adapters.
        """
        return parameters_digest(self.loaded) if self.adapted else None
