"""Choices of vLLM's on GPUs that a learner could not follow, settled for engine, servers and
learner alike.

- FlashInfer is left out. Whether vLLM finds it depends on nvcc and ninja in the shell's PATH. On
  Blackwell its experts
  route tokens themselves, without a gradient for the router, and its attention is not the
  learner's.
- Experts of integer weights are multiplied by Marlin where vLLM 0.32 prefers Humming (9.0), which
  compiles at start and
  has no version of a publish proven. `moe_backend` would choose for all experts of a model,
  whatever their scheme.
- No kernel quantizes a layer's input before it. In vLLM's Llama the gate's would, whose product is
  not rounded then.
- DeepGEMM is left out. It quantizes block scales to powers of two, and the published codes again
  with them.
"""

import os
import sys

from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins


def load_plugins() -> None:
    """vLLM's plugins, as its own processes load them, and `settle`: before a learner builds a
    layer.
    """
    load_general_plugins()
    settle()


def settle() -> None:
    """Settle them in this process; on CPUs, and again, nothing happens."""
    if not current_platform.is_cuda():
        return
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.utils.flashinfer import has_flashinfer

    for holder, name in (
        (LinearBase, "requires_unquantized_input"),
        (int_wna16, "prioritize_humming"),
    ):
        assert hasattr(holder, name), f"vLLM no longer has the {name} that is set here"
    LinearBase.requires_unquantized_input = True
    setattr(int_wna16, "prioritize_humming", list)  # noqa: B010  # leaves their order
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    sys.modules["flashinfer"] = None  # type: ignore[assignment]  # as if it were not installed
    has_flashinfer.cache_clear()
