"""A transformers causal LM over low-bit tensors: master weights in, checkpoint-named low-bit
tensors out.

Every parameter has one master. `refresh()` makes a weight version; forward, publish and export all
read what it made. `quant.model.surgery` puts the layers in, `quant.model.stream` names their
tensors.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qarl.configs.errors import GraphError
from qarl.configs.schema.run import LayerRule
from qarl.quant.checkpoint.shapes import plan_layers, weight_shapes
from qarl.quant.digest import parameters_digest
from qarl.quant.graph.packing import Packed, Pick, Sequences
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.kernels import KernelError
from qarl.quant.layers.context import Forward, LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import materializer
from qarl.quant.materialize.code_changes import FlipCount
from qarl.quant.materialize.scales import checked_together
from qarl.quant.model.row_check import RowCheck, check_rows
from qarl.quant.model.stream import checkpoint_tensors, layer_reports
from qarl.quant.model.surgery import replace_layers
from qarl.quant.schemes import Scheme
from qarl.quant.types import LayerReport, LowBitTensor

if TYPE_CHECKING:
    from qarl.quant.graph.graph import Graph
    from qarl.quant.kernels.engine_layers import EngineLayers


class LowBitModel(nn.Module):
    """Wraps a model loaded in the master dtype.

    model: transformers causal LM whose parameters become the masters. operators: see
    `replace_layers`; then whose norms, rotary embedding, attention and routing the forward runs,
    "engine" or "transformers". why_not_engine: why they are transformers', where they may be the
    engine's; "" elsewhere. rules: layers in other schemes than `scheme`; `plan` says what each
    layer takes. shapes: checkpoint layer name → (O, I) of its weight
    (`quant.checkpoint.shapes.weight_shapes`). linears, experts: low-bit layers by checkpoint name
    ("model.layers.0.mlp.experts"). loaded: every parameter the model came with, by name; masters:
    those that are trained, all of them until `train_only`. adapted: the weights that have an
    adapter. router_log: logits of the routers. Raises the `SchemeError`s of `plan_layers`, before
    anything is changed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: Scheme,
        context: LayerContext,
        operators: str = "auto",
        rules: Sequence[LayerRule] = (),
    ):
        super().__init__()
        self.plan = plan_layers(model, scheme, rules)
        self.shapes = weight_shapes(model)
        self.context = context
        self.config = model.config
        self.loaded: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = dict(self.loaded)
        self.adapted: tuple[str, ...] = ()
        self._buffers_kept = [
            name for name, _ in model.named_buffers() if name in model.state_dict()
        ]
        self._after_refresh: Callable[[], None] | None = None
        self._layers = replace_layers(model, self.plan, context, operators)
        self.linears: dict[str, LowBitLinear] = self._layers.linears
        self.experts: dict[str, RoutedLowBitExperts] = self._layers.experts
        self.operators: str = self._layers.operators
        self.why_not_engine: str = self._layers.why_not
        self.dtype, self.gradients = context.dtype, context.gradients
        self.module = model
        # they stand in no module of the model; whoever asks for parameters sees all
        if self.operators == "engine":
            self._beside = nn.ModuleList(self.low_bit_layers())
        self.router_log = RouterLog()
        self._graphs: dict[torch.dtype, Graph] = {}
        if self.operators == "transformers":
            self.router_log.watch(model.get_submodule(name) for name in self._layers.routers)
        self.refresh()
        if self.operators == "engine":
            # refuses what vLLM has no low-bit layer for, before anything is run
            _ = self.graph

    def low_bit_layers(self) -> Iterator[LowBitLinear | RoutedLowBitExperts]:
        """All that is materialized: linear layers, then experts."""
        return self._layers.low_bit()

    @property
    def device(self) -> torch.device:
        """Where the masters are, and so the forward."""
        return next(iter(self.loaded.values())).device

    @torch.no_grad()
    def refresh(self, flips: FlipCount | None = None) -> None:
        """Materialize every master: a new weight version, used by all forwards, the publish and the
        export.

        It is written over the one before: tensors of an earlier stream (`low_bit_tensors`) change
        with it. flips: takes in how many codes that changes, where they are kept.
        """
        with checked_together():
            for layer in self.low_bit_layers():
                with (
                    flips.over(layer.low_bit)
                    if flips and self.context.keeps_codes
                    else contextlib.nullcontext()
                ):
                    layer.refresh()
        for copy in self._layers.copies.values():
            copy.refresh()
        if self._after_refresh is not None:
            self._after_refresh()

    def on_refresh(self, call: Callable[[], None] | None) -> None:
        """Call that when a weight version is made, before any forward uses it; None: nothing."""
        self._after_refresh = call

    def release_codes(self) -> None:
        """Keep no codes from here on: they are made again from the masters, a layer at a time, for
        every stream and every backward. All processes then iterate over each stream together.
        """
        self.context.drop_codes()
        for layer in self.low_bit_layers():
            layer.release_codes()

    def drop_products(self) -> None:
        """Prepare kernels again at every use of a layer, whose forwards processes that share codes
        run together.
        """
        self.context.drop_products()
        self.release_products()

    def multiply_with(self, engine: "EngineLayers | None") -> None:
        """Have the forward multiply with the running engine's own layers, or again with its own
        (None). Raises `KernelError`, and keeps its own, where a layer of this model is not among
        them.
        """
        if engine is not None and self.operators != "engine":
            raise KernelError(
                "transformers' operators multiply each layer alone, and the engine stacks them"
            )
        self.context.multiply_with(engine)
        self.release_products()
        if engine is not None:
            try:
                self.layers()  # asks for every layer's product
                self.graph.require_same(engine.kinds)
            except KernelError:
                self.multiply_with(None)
                raise

    def multiplied(self, layer: str, *inputs: Tensor) -> Tensor:
        """What the layer of that checkpoint name makes of an input, by the product that this
        model's forward uses, its stack's where it is in one. inputs: as of `LowBitLinear.forward`,
        or of `RoutedLowBitExperts.forward`.
        """
        if layer in self.experts:
            return self.experts[layer](*inputs)
        for stack in self._layers.stacks.values():
            parts = [part.layer for part in stack.parts]
            if layer in parts:
                rows = [part.out_features for part in stack.parts]
                return stack(*inputs)[..., : sum(rows)].split(rows, dim=-1)[parts.index(layer)]
        return self.linears[layer](*inputs)

    def release_products(self) -> None:
        """Give back the kernels' own copies of this weight version, which no backward reads."""
        for layer in (*self.low_bit_layers(), *self._layers.stacks.values()):
            layer.release_product()

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
        dtype, engine = self.context.forward_dtype, self._layers.engine
        if dtype not in self._graphs:
            from qarl.quant.model.engine_model import build_graph

            assert engine is not None
            # The reference multiplies schemes, too, for which vLLM has no layer to build on this
            # machine.
            quantization = None
            if self.context.kernel != "reference":
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

    def hidden(
        self,
        tokens: Tensor,
        wanted: Tensor,
        experts: Tensor | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        """What the output head is given at chosen positions.

        tokens: int64 [B, T], padded on the right. wanted: bool [B, T]. experts: those to route to,
        integer [B, T, L, K] over decoder layers L, -1 where the router is to choose; None lets it
        choose everywhere. packed: how the sequences are put into one row of N tokens, without
        padding. Both are for the engine's operators alone (else `GraphError`). Returns compute
        dtype [n, C], one row for each True in row-major order. Where `router_log` is enabled it
        then holds one [B·T, E] a layer of experts ([N, E] packed).
        """
        if self.operators == "engine":
            if packed is None:
                rows = Sequences.apart([tokens.shape[1]] * len(tokens))
                experts = None if experts is None else experts.flatten(0, 1)
                return self.graph.hidden(tokens.flatten(), rows, experts)[wanted.flatten()]
            experts = None if experts is None else experts[packed.kept]
            hidden = self.graph.hidden(tokens[packed.kept], packed.sequences, experts)
            return Pick.apply(hidden, packed.places[wanted])
        if packed is not None or experts is not None:
            what = (
                "packed sequences need"
                if packed is not None
                else "replaying the engine's expert choices needs"
            )
            raise GraphError(
                f"{what} the engine's operators, and this model has transformers'; leave sequences"
                " padded (learner.packing false) and rollout.router_replay false, or set"
                " learner.operators to 'engine'"
            )
        with self.router_log.one_forward():
            return self.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state[
                wanted
            ]

    def checkpoint_layers(self, checkpointing: bool) -> None:
        """Keep only every decoder layer's input between forward and backward, or everything. Raises
        `ValueError` where transformers cannot do so for this model.
        """
        if self.operators == "engine":
            self.context.checkpoint(checkpointing)
            return
        if checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.module.gradient_checkpointing_disable()
        for layer in self.module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                # transformers asks the layer for it; what is inside stays as it was
                layer.training = checkpointing

    @contextlib.contextmanager
    def forward_as(self, forward: Forward) -> Iterator[None]:
        """Within this context the model multiplies that, without gradient and by the masters of the
        last `refresh`: the published codes also where it is unaligned, as the canary does, or no
        codes also where it is aligned.
        """
        recasts = forward is Forward.UNQUANTIZED and not self.context.aligned
        try:
            with self.context.forward_as(forward):
                if recasts:
                    self._recast()
                yield
        finally:
            if not self.context.aligned:
                self.release_products()
            if recasts:
                self._recast()

    def _recast(self) -> None:
        for layer in self.low_bit_layers():
            layer.recast()

    def low_bit_tensors(self) -> Iterator[LowBitTensor]:
        """Every tensor of the deployable checkpoint, layer by layer, in the checkpoint's names.

        Tied output heads are left out, as transformers leaves them out. Nothing is copied: these
        are the buffers that the next `refresh` writes, to be read before it; after `release_codes`
        each layer's are gone with their use.
        """
        buffers = ((name, self.module.get_buffer(name)) for name in self._buffers_kept)
        return checkpoint_tensors(self._layers, self.loaded, buffers)

    def loaded_state(self) -> dict[str, Tensor]:
        """Return every parameter the model came with, and the buffers that checkpoints keep, by
        transformers' names. A tied output head is not among them; nothing is copied.
        """
        buffers = {name: self.module.get_buffer(name) for name in self._buffers_kept}
        return {
            **{name: parameter.detach() for name, parameter in self.loaded.items()},
            **buffers,
        }

    def layers(self) -> list[LayerReport]:
        """The learner's side of the audit: every layer with the kernel that multiplies it."""
        return layer_reports(self._layers, self.context)

    def check_rows(self) -> RowCheck:
        """Ask every distinct kernel of the forward whether it computes a row alike beside any
        others (`row_check`).
        """
        return check_rows(
            self._layers,
            self.context,
            self.graph if self.operators == "engine" else None,
        )

    def materializers(self) -> dict[str, str]:
        """Scheme → what makes its low-bit tensors here (`quant.materialize.materializer`), for all
        schemes in use.
        """
        schemes = {layer.scheme.name: layer.scheme for layer in self.low_bit_layers()}
        dtype = next(iter(self.loaded.values())).dtype
        return {
            name: str(materializer(scheme, dtype, self.device)) for name, scheme in schemes.items()
        }

    def matrices(self) -> set[str]:
        """Names of the masters that are matrices of the decoder: linear layers' weights and
        experts, no router and no output head; or the factors of their adapters.
        """
        if self.adapted:
            return set(self.masters)
        outside = {
            "lm_head",
            *map(self._layers.family.checkpoint_name, self._layers.routers),
        }
        kept = {
            id(m)
            for layer in self.low_bit_layers()
            if layer.layer not in outside
            for m in layer.masters
        }
        return {name for name, master in self.masters.items() if id(master) in kept}

    def train_only(self, masters: Mapping[str, nn.Parameter], adapted: Sequence[str]) -> None:
        """Freeze what the model came with and train `masters` instead: the factors of adapters, by
        name. adapted: the weights that have one.
        """
        for parameter in (*self.loaded.values(), *self.parameters()):
            parameter.requires_grad_(False)
        for master in masters.values():
            master.requires_grad_(True)
        self.masters, self.adapted = dict(masters), tuple(adapted)

    @functools.cached_property
    def base_digest(self) -> str | None:
        """The digest of the frozen weights under adapters, which no checkpoint of these has; None
        without adapters.
        """
        return parameters_digest(self.loaded) if self.adapted else None
