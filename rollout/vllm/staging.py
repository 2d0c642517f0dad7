"""A weight version made beside the one that a running model answers with, and put in its place at once.

vLLM's layerwise reload changes a model layer by layer: while it works the model is parts of two versions. Here it works
on twins: modules of the same kind, without weights of their own until the reload makes them. Only layers with a tensor
that changed have one; a layer that vLLM stacks (q, k and v; gate and up) is made of all its parts again. Until
`Staged.swap` the model is untouched, also where staging fails, so it may answer meanwhile; `swap` exchanges references,
no bytes. The price is the memory of the layers made anew, until the swap frees the old ones.

On CPUs, and for models whose layers each have their weights to themselves: CUDA graphs hold on to addresses, vLLM's own
experts belong to a kernel, and latent attention derives from several layers at once. `staging_refusal` says so.
tests/engine/test_staging.py holds the outcome against freshly loaded engines.
"""

import copy
from collections.abc import Collection, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.platforms import current_platform

from qarl.quant.kernels.vllm_cpu.experts import PerExpertMethod
from qarl.rollout.engine import EngineError
from qarl.rollout.vllm.names import checkpoint_names
from qarl.rollout.vllm.worker import name_w4a8_weights_once, own_parameters

_TORCHS = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class Staged:
    """Layers of the next version, made by `stage`."""

    def __init__(self, pairs: list[tuple[nn.Module, nn.Module, dict[str, Any]]], twins: Iterable[nn.Module]):
        self._pairs = pairs
        self._twins = list(twins)

    def swap(self) -> None:
        """Put them in the model's place. Between two of its steps, for it is one version before and another after."""
        for live, twin, before in self._pairs:
            _take_over(live, twin, before)
        self.discard()

    def discard(self) -> None:
        """Let go of what is not in the model: twins are in cycles, and would keep a version until Python collects."""
        self._pairs = []
        _empty(self._twins)
        self._twins = []


def staging_refusal(model: nn.Module) -> str | None:
    """Why no version of a model can be made beside it; None where one can."""
    if not current_platform.is_cpu():
        return "CUDA graphs read weights where they lie"
    for method in (module.quant_method for module in model.modules() if isinstance(module, RoutedExperts)):
        if not isinstance(method, PerExpertMethod):
            return "it has unquantized experts, which vLLM packs for a kernel of their own"
        if method.reads_default_dtype:
            return "it has FP8 experts, for which torch's default dtype has to be set, and it may be sampling"
    attention = [module for module in model.modules() if is_deferred_attention_layer(module)]
    if any(own_parameters(module) or hasattr(module, "kv_b_proj") for module in attention):
        return "its attention has weights of other layers"
    return None


def stage(
    model: nn.Module, config: VllmConfig, tensors: Mapping[str, torch.Tensor], changed: Collection[str]
) -> Staged:
    """Make the layers that have a tensor of the names `changed`.

    tensors: the whole version by checkpoint names, in stream order. Raises `EngineError` where a changed tensor is of
    no layer, or a layer lacks some, or `staging_refusal` says why not, and whatever vLLM's loading does; the model is
    what it was.
    """
    if reason := staging_refusal(model):
        raise EngineError(f"no weight version can be made beside this model: {reason}; load it whole instead")
    twins: dict[nn.Module, nn.Module] = {}
    twin_model = _twin(model, twins)
    parts = checkpoint_names(model)
    layers = {_layer(name) for name in changed}
    touched = {module: names for module, names in parts.items() if layers & set(names)}
    wanted = {name for names in touched.values() for name in names}
    if unknown := layers - wanted:
        raise EngineError(f"no layer of the engine takes {min(unknown)!r}, which changed")
    before = {module: dict(twins[module].__dict__) for module in touched}
    try:
        with set_current_vllm_config(config), torch.no_grad():
            for module in touched:
                _prepare(module, twins[module])
            twin_model.load_weights(  # pyright: ignore[reportCallIssue]
                (name, tensor) for name, tensor in tensors.items() if _layer(name) in wanted
            )
            partial = [name for m, (name, *_) in touched.items() if get_layerwise_info(twins[m]).can_load()]
            if partial:
                raise EngineError(f"the engine expected more tensors for the layer of {partial[0]!r}")
            pairs = [(module, twins[module], before[module]) for module in touched]
            return Staged(pairs + _tied_heads(touched, twins), twins.values())
    except BaseException:
        _empty(twins.values())
        raise
    finally:
        for twin in twins.values():
            LAYERWISE_INFO.pop(twin, None)


def _twin(module: nn.Module, twins: dict[nn.Module, nn.Module]) -> nn.Module:
    """The same module, and those in it, with the same tensors, that can be given others."""
    if module in twins:
        return twins[module]
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twins[module] = twin
    twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
    twin._modules = {n: c if c is None else _twin(c, twins) for n, c in module._modules.items()}
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return twin


def _prepare(live: nn.Module, twin: nn.Module) -> None:
    """Have the twin wait for all tensors of its layer, as vLLM's reload has a layer wait."""
    for name in ("quant_method", "scheme"):  # products keep what they packed in objects of their own
        if hasattr(live, name):
            setattr(twin, name, _own_products(getattr(live, name)))
    bias = twin._parameters.get("bias")
    if bias is not None:  # the one parameter that the reload writes in place
        twin._parameters["bias"] = _like(bias, bias.data.clone(), live, twin)
    info = get_layerwise_info(live)
    parameters, buffers = ({n: _like(t, t.data, live, twin) for n, t in some.items()} for some in info.restore_metadata)
    LAYERWISE_INFO[twin] = LayerReloadingInfo((parameters, buffers), info.restore_device)
    name_w4a8_weights_once(twin)
    initialize_layerwise_reload(twin)
    get_layerwise_info(twin).kernel_tensors = None  # nothing is copied back over the live tensors


def _own_products(method: Any) -> Any:
    """A copy, with copies of the products in it."""
    own = copy.copy(method)
    for name, value in vars(method).items():
        if hasattr(value, "process_weights_after_loading"):
            setattr(own, name, copy.copy(value))
    return own


def _like(tensor: torch.Tensor, data: torch.Tensor, live: nn.Module, twin: nn.Module) -> Any:
    """`data` as `tensor` is, with loaders that are the twin's, none of which waits."""
    new: Any = data.view_as(data)
    new.__class__ = tensor.__class__
    new.__dict__ = {name: _bound(value, live, twin) for name, value in tensor.__dict__.items()}
    return new


def _bound(value: Any, other: nn.Module, owner: nn.Module) -> Any:
    while getattr(value, "__name__", "") == "online_process_loader":
        value = value.__wrapped__
    if isinstance(value, MethodType) and value.__self__ in (other, layer_ref_sentinel):
        return value.__func__.__get__(owner)
    return value


def _tied_heads(
    touched: Iterable[nn.Module], twins: dict[nn.Module, nn.Module]
) -> list[tuple[nn.Module, nn.Module, dict[str, Any]]]:
    """Output heads whose weight is a touched embedding's: the twin's is its twin's, and its product is made again."""
    pairs = []
    heads = [(head, twin) for head, twin in twins.items() if isinstance(head, ParallelLMHead)]
    for live in touched:
        weight = live._parameters.get("weight")  # None where a kernel keeps it, as oneDNN's for int8
        for head, twin in heads:
            if weight is not None and head is not live and head._parameters.get("weight") is weight:
                before = dict(twin.__dict__)
                twin._parameters["weight"] = twins[live]._parameters["weight"]
                dispatch_cpu_unquantized_gemm(twin, remove_weight=False)
                pairs.append((head, twin, before))
    return pairs


def _take_over(live: nn.Module, twin: nn.Module, before: dict[str, Any]) -> None:
    """Give the live module its twin's tensors, and whatever else loading set."""
    for name in before.keys() - twin.__dict__.keys():
        del live.__dict__[name]
    for name, value in twin.__dict__.items():
        if name not in _TORCHS and before.get(name, _ABSENT) is not value:
            live.__dict__[name] = value
    for kind in ("_parameters", "_buffers"):
        own, theirs = getattr(live, kind), getattr(twin, kind)
        own.clear()
        own.update(theirs)
        for tensor in theirs.values():
            if tensor is not None:  # not to keep the twin
                vars(tensor).update({n: _bound(value, twin, live) for n, value in vars(tensor).items()})


def _empty(twins: Iterable[nn.Module]) -> None:
    for twin in twins:
        twin.__dict__.clear()


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
