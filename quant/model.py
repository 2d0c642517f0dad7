"""A transformers causal LM over low-bit tensors: master weights in, checkpoint-named low-bit tensors out.

Every parameter has one master. Linear layers become `LowBitLinear`; everything else (embeddings, norms) keeps a
compute-dtype copy whose gradient flows to its master. `refresh()` makes a weight version; forward, publish and
export all read what it made.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quant.kernels import ProductFactory
from quant.linear import LowBitLinear, fuse_scales
from quant.operators import install_engine_operators, why_not
from quant.schemes import Scheme, SchemeError, get_scheme


@dataclass(frozen=True)
class LowBitTensor:
    """One tensor of the published stream. name: as in the checkpoint; tensor: what the forward used."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class LayerReport:
    """One linear layer as one side of the audit sees it. group_size None: a scale per row, or unquantized."""

    name: str
    scheme: str
    group_size: int | None
    dtype: str
    kernel: str


class LowBitModel(nn.Module):
    """Wraps a model loaded in the master dtype.

    model: transformers causal LM whose parameters become the masters. dtype: compute dtype of activations,
    embeddings and norms. factory: kernel family of the learner's products. aligned: see `LowBitLinear`.
    operators: "engine" (`quant.operators`), "transformers", or "auto": the engine's for aligned models they fit.
    Raises `SchemeError` naming every layer the scheme cannot hold, before anything is changed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: Scheme,
        dtype: torch.dtype,
        factory: ProductFactory,
        aligned: bool = True,
        operators: str = "auto",
    ):
        super().__init__()
        _check_head(model)
        self.scheme = scheme
        self.dtype = dtype
        self.config = model.config
        self._order = [name for name, _ in model.named_parameters()]
        self.masters: dict[str, nn.Parameter] = dict(model.named_parameters())
        linears = _linear_layers(model)
        self.ignored = [name for name in linears if scheme.leaves_alone(name)]
        _check_layers(linears, scheme)
        if operators == "auto":
            operators = "engine" if aligned and not why_not(model) else "transformers"
        self.operators = operators
        if operators == "engine":
            install_engine_operators(model, dtype)
        self.linears = self._replace_linears(model, linears, factory, aligned)
        self._copies = self._detach_copies(model)
        self.module = model
        self.refresh()

    @property
    def device(self) -> torch.device:
        """Where the masters are, and so the forward."""
        return next(iter(self.masters.values())).device

    def _replace_linears(
        self, model: nn.Module, linears: dict[str, nn.Linear], factory: ProductFactory, aligned: bool
    ) -> dict[str, LowBitLinear]:
        replaced = {}
        unquantized = get_scheme("bf16")
        for name, linear in linears.items():
            scheme = unquantized if self.scheme.leaves_alone(name) else self.scheme
            assert isinstance(linear.weight, nn.Parameter)
            replaced[name] = LowBitLinear(name, linear.weight, linear.bias, scheme, factory, self.dtype, aligned)
            model.set_submodule(name, replaced[name])
        fuse_scales(replaced)
        return replaced

    def _detach_copies(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Swap the parameters outside linear layers for compute-dtype copies; name → copy."""
        copies: dict[str, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            if isinstance(module, LowBitLinear):
                continue
            for key, master in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{key}" if prefix else key
                copy = nn.Parameter(master.detach().to(self.dtype, copy=True))
                copy.register_post_accumulate_grad_hook(_gradient_to(master))
                setattr(module, key, copy)
                copies[name] = copy
        return copies

    @torch.no_grad()
    def refresh(self) -> None:
        """Materialize every master: a new weight version, used by all forwards, the publish and the export."""
        for linear in self.linears.values():
            linear.refresh()
        for name, copy in self._copies.items():
            copy.copy_(self.masters[name])

    def logits(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Next-token logits at chosen positions.

        tokens: int64 [B, T], padded on the right. wanted: bool [B, T]. Returns compute dtype [n, V], one row for
        each True in row-major order.
        """
        hidden = self.module.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        head = self.module.get_output_embeddings()
        assert head is not None
        return head(hidden[wanted])

    @contextlib.contextmanager
    def published_forward(self) -> Iterator[None]:
        """Within this context an unaligned model multiplies the published codes too; the canary needs it."""
        plain = [linear for linear in self.linears.values() if not linear.aligned]
        self._align(plain, True)
        try:
            yield
        finally:
            self._align(plain, False)

    def _align(self, linears: list[LowBitLinear], aligned: bool) -> None:
        for linear in linears:
            linear.aligned = aligned
            linear.refresh()

    def low_bit_tensors(self) -> Iterator[LowBitTensor]:
        """Every tensor of the deployable checkpoint, layer by layer, in the checkpoint's names.

        Tied output heads are left out, as transformers leaves them out. Nothing is copied or requantized.
        """
        for name in self._order:
            layer, _, key = name.rpartition(".")
            linear = self.linears.get(layer)
            if linear is None:
                yield LowBitTensor(name, self._copies[name].detach())
            elif key == "bias":
                yield LowBitTensor(name, self.masters[name].detach().to(self.dtype))
            else:
                assert linear.low_bit is not None
                for suffix, tensor in linear.low_bit.tensors():
                    yield LowBitTensor(f"{layer}.{suffix}", tensor)

    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json says of this model's quantization; None for the unquantized scheme."""
        return self.scheme.quantization_config(self.ignored)

    def layers(self) -> list[LayerReport]:
        """The learner's side of the audit: every linear layer, with the kernel that multiplies it."""
        return [
            LayerReport(name, linear.scheme.name, linear.scheme.group_size, str(self.dtype), _kernel(linear))
            for name, linear in self.linears.items()
        ]


def _kernel(linear: LowBitLinear) -> str:
    assert linear.product is not None
    return linear.product.name


def _gradient_to(master: nn.Parameter):
    """A hook that moves a compute copy's gradient into its master's, in the master's dtype."""

    def hook(copy: torch.Tensor) -> None:
        assert copy.grad is not None
        gradient = copy.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad + gradient
        copy.grad = None

    return hook


def _check_head(model: PreTrainedModel) -> None:
    """Refuse models that change logits after the output head: `LowBitModel.logits` would miss it."""
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise SchemeError(
                f"model config has {key} = {getattr(model.config, key)}: logits changed after the output head are "
                "not supported; use a model without it"
            )


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every `nn.Linear` by name. Refuses models whose experts are fused 3-D parameters (they would be missed)."""
    fused = [n for n, p in model.named_parameters() if p.ndim == 3 and re.search(r"\.experts\.", n)]
    if fused:
        raise SchemeError(
            f"{fused[0]!r} holds fused experts, which quantized training does not cover yet; use a dense model"
        )
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _check_layers(linears: dict[str, nn.Linear], scheme: Scheme) -> None:
    problems = []
    for name, linear in linears.items():
        if not scheme.leaves_alone(name):
            try:
                scheme.check_layer(name, (linear.out_features, linear.in_features))
            except SchemeError as error:
                problems.append(str(error))
    if problems:
        more = f" (and {len(problems) - 1} more layers)" if len(problems) > 1 else ""
        raise SchemeError(problems[0] + more)
    if scheme.quantization is not None and all(scheme.leaves_alone(name) for name in linears):
        raise SchemeError(f"scheme {scheme.name!r} quantizes none of the model's {len(linears)} linear layers")
