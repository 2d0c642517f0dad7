"""Settings of vLLM on GPUs that engine, servers and learner share.

They replace choices of vLLM's that a learner could not reproduce.

- FlashInfer is disabled. Whether vLLM finds it depends on nvcc and ninja in the shell's PATH. On
  Blackwell its experts route tokens themselves, without a gradient for the router, and its
  attention is not the learner's.
- Marlin multiplies experts of integer weights, even if vLLM 0.32 prefers Humming (at compute
  capability 9.0). Humming compiles at start, and publishing weight versions into it is unverified.
  vLLM's option `moe_backend` would choose for all experts of a model, whatever their scheme.
- No kernel quantizes a layer's input before the layer. In vLLM's Llama the gate's kernel would, and
  its product would then not be rounded.
- From compute capability 10.0 on, vLLM's Triton kernel multiplies `w8a8`. vLLM 0.32 chooses
  CUTLASS's, which has no int8 there and raises (vllm#54311). Remove this when CUTLASS's kernel
  declines by itself.
- In batch-invariant mode unquantized products have one tile for any number of rows. For some shapes
  (Qwen3-1.7B's) vLLM 0.32 takes small tiles for few rows, for which Triton compiles another
  tensor-core instruction than for large ones (`scripts/check_triton.py compile`). Whether both add
  alike is not known. Remove this when a GPU has shown that they do.
- DeepGEMM is disabled. It rounds block scales to powers of two, and quantizes the published codes
  again with those.
"""

import os
import sys
from typing import Any

from vllm.model_executor.kernels.linear import CutlassInt8ScaledMMLinearKernel
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from qarl.quant.kernels.vllm_cpu.library import require_operators
from qarl.quant.runtime.batch_invariance import batch_invariant


def load_plugins() -> None:
    """Load vLLM's plugins, as its own processes do, and call `settle`.

    Call this before a learner builds a layer. Raises `InstallError` if vLLM's operators for CPUs
    could not be loaded.
    """
    load_general_plugins()
    require_operators()
    settle()


def settle() -> None:
    """Apply the settings in this process. Does nothing on CPUs; idempotent."""
    if not current_platform.is_cuda():
        return
    from vllm.model_executor.determinism import batch_invariant_configs
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.utils.flashinfer import has_flashinfer

    for holder, name in (
        (LinearBase, "requires_unquantized_input"),
        (int_wna16, "prioritize_humming"),
    ):
        assert hasattr(holder, name), f"vLLM no longer has the {name} that is set here"
    LinearBase.requires_unquantized_input = True
    if current_platform.has_device_capability(100):
        reason = (False, "CUTLASS has no int8 from compute capability 10.0 on")
        answer: Any = classmethod(lambda *_: reason)
        CutlassInt8ScaledMMLinearKernel.is_supported = answer
    if batch_invariant():
        settings = batch_invariant_configs
        for name in ("_TUNED_MATMUL_CONFIGS_FOR_DEVICE", "_TUNED_MATMUL_CONFIGS_RESOLVED"):
            assert hasattr(settings, name), f"vLLM no longer has the {name} that is set here"
        settings._TUNED_MATMUL_CONFIGS_FOR_DEVICE = None
        settings._TUNED_MATMUL_CONFIGS_RESOLVED = True
    # `list` returns the backends in their order, with Humming not moved to the front.
    setattr(int_wna16, "prioritize_humming", list)  # noqa: B010
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    # An import of flashinfer now fails as if it were not installed.
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    has_flashinfer.cache_clear()
