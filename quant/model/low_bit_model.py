"""A transformers causal LM over low-bit tensors: master weights in, checkpoint-named low-bit tensors out.

Every parameter has one master. Linear layers become `LowBitLinear`, fused experts `RoutedLowBitExperts`; everything
else (embeddings, norms) keeps a compute-dtype copy whose gradient flows to its master. `refresh()` makes a weight
version; forward, publish and export all read what it made.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.schema.run import LayerRule
from quant.checkpoint.families import ExpertsShape, expert_layout, fused_experts
from quant.checkpoint.plan import Plan
from quant.checkpoint.shapes import plan_layers, router_names, weight_shapes
from quant.digest import parameters_digest
from quant.kernels import ProductFactory
from quant.layers.compute_copy import MasterCopy, MasterEmbedding, detach_copy, plain_lookup
from quant.layers.experts import RoutedLowBitExperts
from quant.layers.gradients import Gradients
from quant.layers.linear import LowBitLinear, fuse_scales
from quant.materialize import materializer
from quant.materialize.code_changes import FlipCount
from quant.operators.decoder import EngineDecoderLayer, OperatorError, install_engine_operators, packed_forward, why_not
from quant.operators.moe import EngineMoeBlock
from quant.runtime.zero3 import gathered, whole_shape
from quant.schemes import Scheme, SchemeError
from quant.types import LayerReport, LowBitTensor


class LowBitModel(nn.Module):
    """Wraps a model loaded in the master dtype.

    model: transformers causal LM whose parameters become the masters. dtype: the engine's compute dtype, of
    activations, embeddings and norms. compute_dtype: what an unaligned learner computes in instead; None: the same.
    factory: kernel family of the learner's products. aligned: see `LowBitLinear`.
    operators: "engine" (`quant.operators.decoder`), "transformers", or "auto": the engine's for aligned models they
    fit. rules: layers in other schemes than `scheme`; `plan` says what each layer takes. shapes: checkpoint layer name
    → (O, I) of its weight (`quant.checkpoint.shapes.weight_shapes`). forward_dtype: what the forward computes in now,
    see `published_forward`. gradients: how the backward makes them. loaded: every parameter the model came with, by
    name; masters: those that are trained, all of them unless `quant.model.add_lora.add_adapters` has frozen them and
    put the factors of adapters here. adapted: the weights that have one. Raises the `SchemeError`s of `plan_layers`,
    before anything is changed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: Scheme,
        dtype: torch.dtype,
        factory: ProductFactory,
        aligned: bool = True,
        operators: str = "auto",
        rules: Sequence[LayerRule] = (),
        compute_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if aligned and compute_dtype not in (None, dtype):
            raise SchemeError(
                f"an aligned learner multiplies the engine's codes in the engine's dtype, {dtype}, not "
                f"{compute_dtype}; leave the compute dtype out, or set aligned false"
            )
        self.plan = plan_layers(model, scheme, rules)
        self.shapes = weight_shapes(model)
        self.scheme = scheme
        self.dtype = dtype
        self.compute_dtype = self.forward_dtype = compute_dtype or dtype
        self.config = model.config
        self.gradients = Gradients()
        self._order = [name for name, _ in model.named_parameters()]
        self.loaded: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = dict(self.loaded)
        self.adapted: tuple[str, ...] = ()
        self._layout = expert_layout(model.config.model_type)
        experts = dict(fused_experts(model))
        if operators == "auto":
            operators = "engine" if aligned and not why_not(model) else "transformers"
        self.operators = operators
        self._routers = router_names(experts)
        self._not_matrices = {"lm_head", *map(self._layout.checkpoint_name, self._routers)}
        self._buffers_kept = [n for n, _ in model.named_buffers() if n in model.state_dict()]
        if operators == "transformers":
            _refuse_quantized_routers(self.plan, map(self._layout.checkpoint_name, self._routers))
        if operators == "engine":
            install_engine_operators(model, self.compute_dtype, self.gradients)
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self.linears = self._replace_linears(model, linears, factory, aligned)
        self.experts = self._replace_experts(model, experts, factory, aligned)
        self._copies = self._detach_copies(model)
        self.module = model
        self.router_logits: list[torch.Tensor] = []
        self.records_router_logits = False
        self._recording = False
        for name in self._routers:
            model.get_submodule(name).register_forward_hook(self._record)
        self.refresh()

    @property
    def device(self) -> torch.device:
        """Where the masters are, and so the forward."""
        return next(iter(self.loaded.values())).device

    def _replace_linears(
        self, model: nn.Module, linears: dict[str, nn.Linear], factory: ProductFactory, aligned: bool
    ) -> dict[str, LowBitLinear]:
        replaced = {}
        for name, linear in linears.items():
            layer = self._layout.checkpoint_name(name)
            scheme = self.plan.scheme(layer)
            assert isinstance(linear.weight, nn.Parameter)
            replaced[layer] = LowBitLinear(layer, linear.weight, linear.bias, scheme, factory, self.dtype, aligned)
            replaced[layer].gradients = self.gradients
            replaced[layer].compute_dtype = self.compute_dtype
            model.set_submodule(name, replaced[layer])
        fuse_scales(replaced)
        return replaced

    def _replace_experts(
        self, model: PreTrainedModel, experts: dict[str, Any], factory: ProductFactory, aligned: bool
    ) -> dict[str, RoutedLowBitExperts]:
        replaced = {}
        for name, fused in experts.items():
            layer = self._layout.checkpoint_name(name)
            count, merged, hidden = whole_shape(fused.gate_up_proj)
            shape = ExpertsShape(
                count, model.config.num_experts_per_tok, hidden, merged // 2, model.config.hidden_act, self._layout
            )
            scheme = self.plan.scheme(f"{layer}.0.{self._layout.down}")  # one for all, as plans make sure
            replaced[layer] = RoutedLowBitExperts(
                layer, fused.gate_up_proj, fused.down_proj, shape, scheme, factory, self.dtype, aligned
            )
            replaced[layer].gradients = self.gradients
            replaced[layer].compute_dtype = self.compute_dtype
            model.set_submodule(name, replaced[layer])
        return replaced

    def _detach_copies(self, model: nn.Module) -> dict[str, MasterCopy]:
        """Let everything outside linear layers and experts read compute-dtype copies; name → copy."""
        copies: dict[str, MasterCopy] = {}
        for prefix, module in list(model.named_modules()):
            if isinstance(module, LowBitLinear | RoutedLowBitExperts):
                continue
            if type(module) is nn.Embedding and plain_lookup(module):
                copy = copies[f"{prefix}.weight"] = MasterCopy(module.weight, self.dtype, self.compute_dtype)
                model.set_submodule(prefix, MasterEmbedding(module, copy, self.gradients))
                continue
            for key, _ in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{key}" if prefix else key
                copies[name] = MasterCopy(getattr(module, key), self.dtype, self.compute_dtype)
                detach_copy(module, key, copies[name], self.gradients)
        return copies

    @torch.no_grad()
    def refresh(self, flips: FlipCount | None = None) -> None:
        """Materialize every master: a new weight version, used by all forwards, the publish and the export.

        It is written over the one before: tensors of an earlier stream (`low_bit_tensors`) change with it. flips: takes
        in how many codes that changes.
        """
        for layer in self._multiplied():
            with flips.over(layer) if flips else contextlib.nullcontext():
                self._materialize(layer)
        for name, copy in self._copies.items():
            with gathered([self.loaded[name]]):
                copy.refresh(self.loaded[name])

    def _materialize(self, layer: LowBitLinear | RoutedLowBitExperts) -> None:
        partners = layer.fused if isinstance(layer, LowBitLinear) else ()
        with gathered(parameter for part in (layer, *partners) for parameter in part.parameters()):
            layer.refresh()

    def forward(self, compute: Callable[..., Any], *given: Any) -> Any:
        """`compute(self, *given)` as one call of this module, so that whatever hooks into modules (ZeRO-3) sees one
        forward begin and end, whichever of the methods below it is made of."""
        return compute(self, *given)

    def release_products(self) -> None:
        """Give back the kernels' own copies of this weight version, which no backward reads."""
        for layer in self._multiplied():
            layer.release_product()

    def logits(self, tokens: torch.Tensor, wanted: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Next-token logits at chosen positions, compute dtype [n, V]; arguments and order of rows as of `hidden`."""
        return self.head(self.hidden(tokens, wanted, experts))

    @property
    def head(self) -> nn.Module:
        """The output head: compute dtype [n, C] → logits, compute dtype [n, V]."""
        head = self.module.get_output_embeddings()
        assert head is not None
        return head

    def hidden(
        self,
        tokens: torch.Tensor,
        wanted: torch.Tensor,
        experts: torch.Tensor | None = None,
        length: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the output head is given at chosen positions.

        tokens: int64 [B, T], padded on the right. wanted: bool [B, T]. experts: those to route to, integer [B, T, L, K]
        over decoder layers L, -1 where the router is to choose; None lets it choose everywhere. length: int64 [B]; with
        it the N real tokens are packed into one row and padding is not computed, which the engine's operators alone can
        do (else `OperatorError`). Returns compute dtype [n, C], one row for each True in row-major order. With
        `records_router_logits`, `router_logits` then holds one [B·T, E] a layer of experts ([N, E] packed).
        """
        if length is not None and self.operators != "engine":
            raise OperatorError(
                f"packed sequences need the engine's operators, not {self.operators!r}; leave them padded"
            )
        real = None if length is None else torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
        if real is not None:
            tokens, wanted = tokens[real][None], wanted[real][None]
            experts = None if experts is None else experts[real][None]
        self.router_logits.clear()
        self._replay(experts)
        self._recording = self.records_router_logits
        if length is None:
            hidden = self.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        else:
            hidden = packed_forward(self.module.base_model, tokens, length.tolist())
        self._recording = False  # a checkpointed layer comes by its router again in the backward
        return hidden[wanted]

    def checkpoint_layers(self, checkpointing: bool) -> None:
        """Keep only every decoder layer's input between forward and backward, or everything. Raises `ValueError` where
        transformers cannot do so for this model."""
        if self.operators == "engine":
            for layer in self.module.modules():
                if isinstance(layer, EngineDecoderLayer):
                    layer.checkpointing = checkpointing
        elif checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.module.gradient_checkpointing_disable()
        for layer in self.module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = checkpointing  # transformers asks the layer for it; what is inside stays as it was

    def _replay(self, experts: torch.Tensor | None) -> None:
        blocks = [module for module in self.module.modules() if isinstance(module, EngineMoeBlock)]
        if experts is not None and not blocks:
            raise OperatorError(
                "the engine's expert choices can be replayed by the engine's operators alone, which this model does "
                "not run with; set rollout.router_replay false, or learner.operators 'engine' where the model allows"
            )
        for block in blocks:
            block.replayed = None if experts is None else experts[:, :, block.decoder_layer].flatten(0, 1)

    def _record(self, router: nn.Module, inputs: object, output: Any) -> None:
        if self._recording:
            self.router_logits.append(output if isinstance(output, torch.Tensor) else output[0])

    @contextlib.contextmanager
    def published_forward(self) -> Iterator[None]:
        """Within this context an unaligned model multiplies the published codes too, in the engine's dtype; the canary
        needs it."""
        plain = [layer for layer in self._multiplied() if not layer.aligned]
        self._publish_forward(plain, True)
        try:
            yield
        finally:
            self._publish_forward(plain, False)

    def _publish_forward(self, layers: list[LowBitLinear | RoutedLowBitExperts], published: bool) -> None:
        for layer in layers:
            layer.aligned = published
            self._materialize(layer)
        for copy in self._copies.values():
            copy.published_forward = published
        self.forward_dtype = self.dtype if published else self.compute_dtype
        for module in self.module.modules():
            if isinstance(module, EngineDecoderLayer):
                module.dtype = self.forward_dtype

    def _multiplied(self) -> Iterator[LowBitLinear | RoutedLowBitExperts]:
        yield from self.linears.values()
        yield from self.experts.values()

    def low_bit_tensors(self) -> Iterator[LowBitTensor]:
        """Every tensor of the deployable checkpoint, layer by layer, in the checkpoint's names.

        Tied output heads are left out, as transformers leaves them out. Nothing is copied or requantized: these are the
        buffers that the next `refresh` writes, to be read before it.
        """
        for name in self._order:
            written = self._layout.checkpoint_name(name)
            layer, _, key = written.rpartition(".")
            if layer in self.experts:
                yield from self._expert_tensors(layer) if key == "gate_up_proj" else ()
            elif layer not in self.linears:
                yield LowBitTensor(written, self._copies[name].published)
            elif key == "bias":
                bias = self.linears[layer].low_bit_bias
                assert bias is not None
                yield LowBitTensor(written, bias)
            else:
                low_bit = self.linears[layer].low_bit
                assert low_bit is not None
                for suffix, tensor in low_bit.tensors():
                    yield LowBitTensor(f"{layer}.{suffix}", tensor)
        for name in self._buffers_kept:
            yield LowBitTensor(self._layout.checkpoint_name(name), self.module.get_buffer(name))

    def _expert_tensors(self, layer: str) -> Iterator[LowBitTensor]:
        low_bit = self.experts[layer].low_bit
        assert low_bit is not None
        for suffix, tensor in low_bit.tensors(self._layout):
            yield LowBitTensor(f"{layer}.{suffix}", tensor)

    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json says of this model's quantization; None where nothing is quantized."""
        return self.plan.quantization_config()

    def layers(self) -> list[LayerReport]:
        """The learner's side of the audit: every linear layer and every layer's experts, with the kernel that
        multiplies them."""
        reports = [
            LayerReport(name, layer.scheme.name, layer.scheme.group_size, str(self.dtype), layer.product.name)
            for name, layer in (self.linears | self.experts).items()
        ]
        routers = [name for name in map(self._layout.checkpoint_name, self._routers) if name not in self.linears]
        return reports + [LayerReport(name, "bf16", None, str(self.dtype), "unquantized") for name in routers]

    def materializers(self) -> dict[str, str]:
        """Scheme → what makes its low-bit tensors here (`quant.materialize.materializer`), for all schemes in use."""
        schemes = {layer.scheme.name: layer.scheme for layer in self._multiplied()}
        dtype = next(iter(self.loaded.values())).dtype
        return {name: materializer(scheme, dtype, self.device) for name, scheme in schemes.items()}

    def matrices(self) -> set[str]:
        """Names of the masters that are matrices of the decoder: linear layers' weights and experts, no router and no
        output head; or the factors of their adapters."""
        if self.adapted:
            return set(self.masters)
        kept = {id(layer.master) for name, layer in self.linears.items() if name not in self._not_matrices}
        kept |= {id(master) for layer in self.experts.values() for master in layer.masters}
        return {name for name, master in self.masters.items() if id(master) in kept}

    @functools.cached_property
    def base_digest(self) -> str | None:
        """SHA-256 of the frozen weights under adapters, which no checkpoint of the adapters holds; None where every
        master is trained."""
        return parameters_digest(self.loaded) if self.adapted else None


def _refuse_quantized_routers(plan: Plan, routers: Iterable[str]) -> None:
    forced = [name for name in routers if plan.scheme(name).quantization is not None]
    if forced:
        raise SchemeError(
            f"a rule quantizes the router {forced[0]!r}, which transformers' own operators multiply unquantized; drop "
            "the rule, or set learner.operators to 'engine' where the model allows"
        )
