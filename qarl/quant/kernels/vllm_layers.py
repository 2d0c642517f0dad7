"""Functions on a loaded vLLM layer that learner and engine share.

They return the name of its kernel, and make the layer release its old weight version.
"""

from typing import Any

from torch import nn

from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT, batch_invariant

INT8_ACTIVATIONS = "int8 activations by VLLM_CPU_INT4_W4A8"
"""Part of the names of kernels that get int8 activations from vLLM, which happens on CPUs with AMX
unless that environment variable is 0.
"""

QUANTIZED = "quantized activations"
"""Part of the names of Humming's kernels that quantize activations."""
UNQUANTIZED = "activations in the compute dtype"
"""Part of the names of Humming's kernels that do not; the class is the same."""


def kernel_name(layer: Any) -> str:
    """Return the name of the kernel in a vLLM linear layer or experts module.

    layer: any vLLM layer with a `quant_method`. The name is the class of the kernel object, with
    these exceptions and additions:

    - An unquantized linear layer has no kernel object and reads "unquantized".
    - Experts that run as dense products, one expert at a time, read "…, per expert".
    - A kernel that quantizes activations because of an environment variable, not the checkpoint,
      names that variable.
    - Humming's kernels say what they do with activations.
    - In vLLM's batch-invariant mode, a kernel that supports the mode says so.
    """
    name = _name(layer)
    if batch_invariant() and _is_batch_invariant(layer):
        return f"{name}, {BATCH_INVARIANT}"
    return name


def _name(layer: Any) -> str:
    """Return `kernel_name` without the batch-invariant mode."""
    method = layer.quant_method
    fused = getattr(method, "moe_kernel", None)
    experts_class = getattr(method, "experts_cls", None)
    if fused is not None:
        return type(fused.fused_experts).__name__ + _activations(fused.fused_experts)
    if experts_class is not None:  # Experts whose weights are not loaded yet.
        return experts_class.__name__
    dense = getattr(method, "dense", None)
    if dense:
        return f"{_name(dense['w13'][0])}, per expert"
    kernel = _kernel(layer)
    if kernel is not None:
        name = type(kernel).__name__ + _activations(kernel)
        return f"{name}, {INT8_ACTIVATIONS}" if getattr(layer, "use_w4a8", False) else name
    name = type(method).__name__
    return "unquantized" if name.startswith("Unquantized") else name


def _kernel(layer: Any) -> Any:
    """Return the kernel object of a linear layer; None if it has none."""
    for holder in (getattr(layer, "scheme", None), layer.quant_method):
        for name in ("kernel", "fp8_linear"):
            kernel = getattr(holder, name, None)
            if kernel is not None:
                return kernel
    return None


_INVARIANT = (
    "CutlassInt8ScaledMMLinearKernel",
    "TritonInt8ScaledMMLinearKernel",
    "CutlassNvFp4LinearKernel",
)
"""Names of batch-invariant kernels that do not report it."""


def _is_batch_invariant(layer: Any) -> bool:
    """Return whether the layer's kernel supports vLLM's batch-invariant mode, according to vLLM.

    - Experts and FP8 kernels report it.
    - Layers without a kernel object use vLLM's persistent product, which supports it.
    - Humming's kernels are configured for the mode.
    - NVFP4 is forced to CUTLASS by the mode.
    - vLLM states nothing for int8 by CUTLASS or Triton, but sums of integers are exact.
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
    if name.startswith("Humming"):
        return True
    if name in _INVARIANT:
        return True
    return fp8_scaled_mm_is_batch_invariant(kernel)


def _activations(kernel: Any) -> str:
    """Return a suffix for a name: what loaded Humming kernels or experts do with activations.

    "" for other kernels.
    """
    configs = getattr(kernel, "humming_configs", None)
    config = configs["w13"] if configs else getattr(kernel, "layer_config", None)
    mode = getattr(config, "input_quant_mode", None)
    if mode is None:
        return ""
    return f", {QUANTIZED if mode.should_quantize else UNQUANTIZED}"


def drop_loaders(layer: nn.Module) -> None:
    """Remove the weight loaders of a loaded layer's parameters.

    A loader refers to the layer, which makes a reference cycle: each weight version's tensors would
    stay in memory until Python's garbage collector runs.
    """
    for parameter in layer.parameters():
        if hasattr(parameter, "weight_loader"):
            del parameter.weight_loader  # type: ignore[attr-defined]
