"""The name of the kernel a vLLM linear layer multiplies with, read from the layer; used on both sides of the audit."""

from typing import Any


def kernel_name(linear: Any) -> str:
    """Class name of the kernel object in a loaded vLLM linear layer.

    linear: any vLLM layer with a `quant_method`. Unquantized layers have no kernel object and read "unquantized".
    """
    scheme = getattr(linear, "scheme", None)
    for holder in (scheme, getattr(linear, "quant_method", None)):
        for attribute in ("kernel", "fp8_linear"):
            kernel = getattr(holder, attribute, None)
            if kernel is not None:
                return type(kernel).__name__
    method = type(linear.quant_method).__name__
    return "unquantized" if method.startswith("Unquantized") else method
