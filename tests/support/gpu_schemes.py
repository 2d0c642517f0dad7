"""Schemes that a GPU of a given capability is known to run.

For these a refusal fails a test instead of skipping it.
"""

from importlib.util import find_spec

import pytest
import torch

from qarl.quant.kernels.supported import support

DTYPE = torch.bfloat16
_INT4 = ("w4a16", "w4a16-g64", "w4a16-g32", "w4a16-channel")
RUNS = {
    (8, 0): ("bf16", *_INT4, "w8a16", "w8a8"),
    (8, 9): ("bf16", *_INT4, "w8a16", "w8a8", "fp8"),
    (9, 0): (
        "bf16",
        *_INT4,
        "w8a16",
        "w8a8",
        "w4afp8",
        "fp8",
        "fp8-block",
        "nvfp4a16",
        "mxfp4a16",
    ),
}
"""Capability → schemes for which vLLM's sources have dense kernels on a GPU."""
RUNS_EXPERTS = ("bf16", "w4a16", "w8a8", "fp8")
"""Capability → those of them for which vLLM also has kernels of routed experts."""


def bound(scheme: str) -> float:
    """Return the bound on a product's relative error.

    CUTLASS rounds w4afp8's group scales to e4m3 when it loads them: 2.2 to 2.6 %.
    """
    return 0.04 if scheme == "w4afp8" else 0.02


def need(scheme: str, experts: bool = False) -> None:
    """Skip with the reason if vLLM cannot run a scheme on this machine.

    Fail if the machine is known to run it.
    """
    if not find_spec("vllm"):
        pytest.skip("vllm is not installed")
    reason = support(scheme, DTYPE, experts).reason
    known = scheme in RUNS.get(torch.cuda.get_device_capability(), ()) and (
        not experts or scheme in RUNS_EXPERTS
    )
    if reason and known:
        pytest.fail(f"vLLM has kernels for {scheme!r} on GPUs of this capability: {reason}")
    if reason:
        pytest.skip(reason)
