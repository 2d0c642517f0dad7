"""What learner and engine ask of a loaded vLLM layer: its kernel's name, and to let its old version
go.
"""

from typing import Any

from torch import nn

from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT, batch_invariant

INT8_ACTIVATIONS = "int8 activations by VLLM_CPU_INT4_W4A8"
"""Part of the names of kernels to which vLLM gives int8 activations on CPUs with AMX unless that
variable is 0.
"""

QUANTIZED, UNQUANTIZED = "quantized activations", "activations in the compute dtype"
"""Parts of the names of Humming's kernels: one class does either, as its configuration says."""


def kernel_name(layer: Any) -> str:
    """Class name of the kernel object in a loaded vLLM linear layer or experts module.

    layer: any vLLM layer with a `quant_method`. Unquantized linear layers have no kernel object and
    read "unquantized"; experts run as dense products one by one read "… per expert". A kernel that
    quantizes activations because the environment says so, and not the checkpoint, names the
    variable. Humming's say what they do with activations. Where vLLM's batch-invariant mode is on,
    those that keep it say so.
    """
    name = _name(layer)
    return (
        f"{name}, {BATCH_INVARIANT}" if batch_invariant() and _is_batch_invariant(layer) else name
    )


def _name(layer: Any) -> str:
    method = layer.quant_method
    fused, chosen = (
        getattr(method, "moe_kernel", None),
        getattr(method, "experts_cls", None),
    )
    if fused is not None:
        return type(fused.fused_experts).__name__ + _activations(fused.fused_experts)
    if chosen is not None:  # experts of which nothing is loaded
        return chosen.__name__
    if dense := getattr(method, "dense", None):
        return f"{_name(dense['w13'][0])}, per expert"
    kernel = _kernel(layer)
    if kernel is not None:
        name = type(kernel).__name__ + _activations(kernel)
        return f"{name}, {INT8_ACTIVATIONS}" if getattr(layer, "use_w4a8", False) else name
    name = type(method).__name__
    return "unquantized" if name.startswith("Unquantized") else name


def _kernel(layer: Any) -> Any:
    """The kernel object of a linear layer; None where it has none."""
    holders = (getattr(layer, "scheme", None), layer.quant_method)
    kernels = (
        getattr(holder, name, None) for holder in holders for name in ("kernel", "fp8_linear")
    )
    return next((kernel for kernel in kernels if kernel is not None), None)


def _is_batch_invariant(layer: Any) -> bool:
    """Whether the layer's kernel keeps vLLM's batch-invariant mode, by vLLM's own word: layers
    without a kernel object multiply by its persistent product, experts and FP8 kernels are asked,
    Humming's are given the mode, NVFP4 is forced to CUTLASS by it. Of int8 by CUTLASS vLLM says
    nothing; sums of integers are exact in any order.
    """
    from vllm.model_executor.kernels.linear import fp8_scaled_mm_is_batch_invariant

    method = layer.quant_method
    experts = getattr(method, "experts_cls", None)
    if experts is not None:
        return experts._supports_batch_invariance()
    kernel = _kernel(layer)
    if kernel is None:
        return type(method).__name__.startswith("Unquantized")
    name = type(kernel).__name__
    keeps = name.startswith("Humming") or name in (
        "CutlassInt8ScaledMMLinearKernel",
        "CutlassNvFp4LinearKernel",
    )
    return keeps or fp8_scaled_mm_is_batch_invariant(kernel)


def _activations(kernel: Any) -> str:
    """What a Humming kernel, loaded, or experts of such, do with activations, to be appended; "" of
    others.
    """
    configs = getattr(kernel, "humming_configs", None) or {
        "w13": getattr(kernel, "layer_config", None)
    }
    mode = getattr(configs["w13"], "input_quant_mode", None)
    return "" if mode is None else f", {QUANTIZED if mode.should_quantize else UNQUANTIZED}"


def drop_loaders(layer: nn.Module) -> None:
    """Cut the way back from a loaded layer's parameters to the layer, through their loaders: a
    cycle that would keep each weight version's tensors until Python's collector comes by.
    """
    for parameter in layer.parameters():
        if hasattr(parameter, "weight_loader"):
            del parameter.weight_loader  # type: ignore[attr-defined]
