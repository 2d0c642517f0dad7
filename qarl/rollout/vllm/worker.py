"""The worker's side of a publish: loads a stream of tensors into the model, layer by layer.

The stream has the checkpoint's names. vLLM 0.32's own `reload_weights` is wrong in six ways, the
last of them on every device, the others on CPUs. All are undone here:

- It copies reprocessed tensors back over the first load's, while oneDNN handlers keep raw pointers
  to what they were built from (W8A8 then multiplies with freed scales). Here the new processed
  tensors stay.
- A tied lm_head keeps the prepacked copy of the old embedding. Here its product is prepared again.
- A W4A8 layer has one parameter under two names, and a reload waits for both. Here it keeps the
  checkpoint's name.
- Unquantized experts are prepacked at the first load only and then left raw. Here their kernel is
  made anew.
- A Mamba-2 layer reads its convolution through a view of the first load's weight. Here it gets a
  view of the new one.
- gpt-oss copies stacks of experts and attention's sinks into parameters that a reload has emptied,
  past it, so that the old ones stay. Here stacks are loaded expert by expert, for which it has
  loaders, and the sinks' module is left out of the reload, so that they are copied in place.

tests/engine/test_publish.py compares the outcome with freshly loaded engines. Remove each
workaround when vLLM's own reload passes that test.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import (
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A8Int,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.platforms import current_platform

from qarl.quant.digest import ReceivedDigest
from qarl.quant.kernels.engine_layers import without_towers
from qarl.quant.kernels.vllm_layers import kernel_name
from qarl.quant.schemes import scheme_of_args
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.engine import LoadReport
from qarl.rollout.vllm.in_place import put_back, unregistered_tensors
from qarl.rollout.vllm.names import (
    checkpoint_names,
    copied_modules,
    layer_names,
    tower_modules,
    trace_names,
)

_UNQUANTIZED = (
    UnquantizedLinearMethod,
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
)


_EXPERT_PARTS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
"""Stack of gpt-oss's experts → vLLM's name of one expert's part of it."""


class WorkerExtension:
    """Mixin of vLLM's worker; `self` is the worker. vLLM calls the methods by `collective_rpc`."""

    vllm_config: VllmConfig
    model_runner: Any

    def qarl_load(self, stream: Iterable[LowBitTensor]) -> LoadReport:
        """Load a published stream into the running model and report what was consumed."""
        return load_stream(self.model_runner.get_model(), self.vllm_config, stream)

    def qarl_layers(self) -> list[LayerReport]:
        """Report every linear layer of the model, and the experts of each layer as one.

        Fused layers are reported by their checkpoint names. Convolutions, which vLLM holds as
        linear layers, are left out.
        """
        model: nn.Module = self.model_runner.get_model()
        dtype = str(self.vllm_config.model_config.dtype)
        trace_names(model, self.vllm_config)
        convolutions = {
            part
            for module in model.modules()
            if isinstance(module, MambaBase)
            for name, part in module.named_children()
            if name.startswith("conv")
        }
        reports = []
        for name, module in without_towers(model):
            if module in convolutions:
                continue
            if isinstance(module, LinearBase | ParallelLMHead) and hasattr(module, "quant_method"):
                scheme, group = _scheme_of(module, name, self.vllm_config)
            elif isinstance(module, RoutedExperts):
                first_expert = f"{module.layer_name}.0.{module.ckpt_down_proj_name}"
                scheme, group = _scheme_of(module, first_expert, self.vllm_config)
            else:
                continue
            kernel = kernel_name(module)
            for layer in layer_names(model, name, module):
                reports.append(
                    LayerReport(layer, scheme, group_size=group, dtype=dtype, kernel=kernel)
                )
        return reports


def load_stream(model: nn.Module, config: VllmConfig, stream: Iterable[LowBitTensor]) -> LoadReport:
    """Load a published stream into a running model, layer by layer.

    If it breaks off, the model holds parts of two weight versions until another stream is loaded
    completely.
    """
    digest = ReceivedDigest()
    by_expert = any(hasattr(module, "_try_load_streamed_expert") for module in model.modules())
    sent = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for item in digest.over(stream):
            sent.append(item.name)
            yield from _by_expert(item) if by_expert else [(item.name, item.tensor)]

    trace_names(model, config)
    before = checkpoint_names(model)
    with set_current_vllm_config(config), torch.no_grad():
        if current_platform.is_cpu():
            _name_w4a8_weights_once(model)
        _begin_reload(model)
        # a tower may copy what it loads, too (Emu3's)
        for module in dict.fromkeys((*copied_modules(model), *tower_modules(model))):
            _place_kernel_tensors(module, get_layerwise_info(module))
            get_layerwise_info(module).reset()
        processed = _processed_layers(model)
        if current_platform.is_cpu():
            _keep_new_tensors(processed)
        unregistered = {} if current_platform.is_cpu() else unregistered_tensors(model)
        try:
            model.load_weights(tensors())  # pyright: ignore[reportCallIssue]
            waiting = _waiting_layers(processed)
            finalize_layerwise_reload(model, config.model_config)
        except BaseException:
            _abandon_reload(model)
            raise
        finally:
            put_back(unregistered, model, graphs=not config.model_config.enforce_eager)
        if current_platform.is_cpu():
            _prepare_heads(model)
            _view_convolutions(model)
    unconsumed, missing = compare_names(before.values(), sent)
    incomplete = tuple(sorted({*missing, *waiting}))
    return LoadReport(digest.hexdigest(), unconsumed, incomplete)


def _by_expert(item: LowBitTensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parts of a stack of gpt-oss's experts by vLLM's names of them; others as they are.

    "….experts.gate_up_proj" [E, H, 2I] becomes "….experts.0.w13_weight" [H, 2I] and so on.
    """
    layer, _, key = item.name.rpartition(".")
    part = _EXPERT_PARTS.get(key) if layer.endswith(".experts") else None
    if part is None:
        yield item.name, item.tensor
        return
    for number, tensor in enumerate(item.tensor):
        yield f"{layer}.{number}.{part}", tensor


def compare_names(
    expected: Iterable[Iterable[str]], sent: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the layers of the stream that the model lacks, and those of the model without tensors.

    Args:
        expected: Checkpoint names of the layers in each module (`checkpoint_names`).
        sent: Names of the stream's tensors.
    """
    expected_layers = {name for names in expected for name in names}
    sent_layers = {name.rpartition(".")[0] for name in sent}
    unconsumed = tuple(sorted(sent_layers - expected_layers))
    missing = tuple(sorted(expected_layers - sent_layers))
    return unconsumed, missing


def _name_w4a8_weights_once(model: nn.Module) -> None:
    """Drop the alias `weight_packed` of W4A8 weights, and make the kernel use `weight`.

    A reload would restore the alias.
    """
    for module in model.modules():
        scheme = getattr(module, "scheme", None)
        if isinstance(scheme, CompressedTensorsW4A8Int):
            get_layerwise_info(module).restore_metadata[0].pop("weight_packed", None)
            scheme.kernel.w_q_name = "weight"


def _begin_reload(model: nn.Module) -> None:
    """Begin vLLM's reload, but on GPUs load biases into new tensors that are copied back.

    vLLM loads biases in place. Marlin's permutation then moves them away from where CUDA graphs
    read, and Humming's biases have lost their loader.
    """
    linear = [
        module
        for module in model.modules()
        if isinstance(module, LinearBase) and not current_platform.is_cpu()
    ]
    # The reload asks loaders for a name, which partial functions lack (MiniMax's norms).
    for tensor in (*model.parameters(), *model.buffers()):
        loader: Any = getattr(tensor, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = "partial"  # type: ignore[attr-defined]
    biased: list[Any] = [layer for layer in linear if layer.bias is not None]
    for layer in biased:
        if not hasattr(layer.bias, "weight_loader"):
            vars(layer.bias).update(output_dim=0, weight_loader=layer.weight_loader)
    initialize_layerwise_reload(model)
    for layer in biased:
        before = layer.bias
        rows = sum(layer.output_partition_sizes)
        layer.bias = nn.Parameter(
            before.new_empty(rows, dtype=layer.params_dtype), requires_grad=False
        )
        vars(layer.bias).update(vars(before))


def _processed_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers, by name, whose weights vLLM processes once all their tensors are there.

    Unquantized embeddings and output heads are none of them: they are copied in place, so that tied
    ones stay one tensor.
    """
    layers = []
    for name, module in without_towers(model):
        method = getattr(module, "quant_method", None)
        in_place = is_deferred_attention_layer(module) or isinstance(
            method, UnquantizedEmbeddingMethod
        )
        has_weights = any(True for _ in module.parameters(recurse=False)) or isinstance(
            module, RoutedExperts
        )
        if isinstance(method, QuantizeMethodBase) and not in_place and has_weights:
            layers.append((name, module))
    return layers


def _keep_new_tensors(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Make reprocessed tensors stay in their layers, where vLLM would copy them into the former."""
    for _, module in layers:
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None  # type: ignore[union-attr]
        info = get_layerwise_info(module)
        assert info.kernel_tensors is not None, (
            "vLLM's reload no longer copies back into what it keeps here"
        )
        info.kernel_tensors = None


def _waiting_layers(layers: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the names of the layers that got some of their tensors, but not all.

    Off CPUs routed experts are passed over: kernels may pad them, and vLLM counts what pads as
    tensors that did not come.
    """
    return [
        name
        for name, module in layers
        if get_layerwise_info(module).can_load()
        and (current_platform.is_cpu() or isinstance(module, LinearBase))
    ]


def _abandon_reload(model: nn.Module) -> None:
    """End a reload that broke off, so that the next one can begin.

    Layers that wait for tensors get back the tensors that a reload copies into. The others stay
    empty until the next reload.
    """
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
            info.reset()


def _prepare_heads(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            # Not imported by name: the plugin may replace it after this module is imported.
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _view_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, MambaMixer2):
            # with AVX512-BF16 vLLM packs the weight, which no kernel of Mamba-2 reads so
            packed: Any = module.conv1d
            weight = getattr(packed, "_cpu_unpacked_conv_weight", packed.weight)
            module.conv_weights = weight.data.view(module.conv_weights.shape)


def _scheme_of(
    module: nn.Module,
    name: str,
    config: VllmConfig,
) -> tuple[str, int | None]:
    """Return name and group size of a layer's scheme, from the arguments that vLLM parsed."""
    quantization = config.quant_config
    if quantization is None or isinstance(module.quant_method, _UNQUANTIZED):
        return "bf16", None
    parsed = quantization.get_scheme_dict(module, name)  # pyright: ignore[reportAttributeAccessIssue]
    if parsed is None:  # unquantized experts that are multiplied one after another
        return "bf16", None
    scheme = scheme_of_args(parsed["weights"], parsed["input_activations"])
    return (scheme.name, scheme.group_size) if scheme else (f"unknown ({parsed['weights']})", None)
