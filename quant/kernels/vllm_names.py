"""The name of the kernel a vLLM layer multiplies with, read from the layer; used on both sides of the audit."""

from typing import Any


def kernel_name(layer: Any) -> str:
    """Class name of the kernel object in a loaded vLLM linear layer or experts module.

    layer: any vLLM layer with a `quant_method`. Unquantized linear layers have no kernel object and read
    "unquantized"; experts run as dense products one by one read "… per expert".
    """
    method = layer.quant_method
    fused = getattr(method, "moe_kernel", None)
    if fused is not None:
        return type(fused.fused_experts).__name__
    for holder in (getattr(layer, "scheme", None), method):
        for attribute in ("kernel", "fp8_linear"):
            kernel = getattr(holder, attribute, None)
            if kernel is not None:
                dense = hasattr(layer, "output_size")
                return type(kernel).__name__ if dense else f"{type(kernel).__name__}, per expert"
    name = type(method).__name__
    return "unquantized" if name.startswith("Unquantized") else name
