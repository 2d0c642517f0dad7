"""vLLM's batch-invariant mode on GPUs.

In this mode a kernel's sums over a row do not depend on the rows computed beside it. vLLM reads one
environment variable wherever it chooses a kernel, in Python and in its operators. The learner's
operators read the same variable.

Source: vLLM 0.32, `vllm.model_executor.determinism.batch_invariant`.
"""

import os
from typing import Any

_VARIABLE = "VLLM_BATCH_INVARIANT"

BATCH_INVARIANT = "batch-invariant"
"""Part of a kernel's name if the mode is on and the kernel supports it."""

FIRST_CAPABILITY = (9, 0)
"""First compute capability with the mode.

Below it vLLM replaces torch's `linear` and `matmul`, for the process, by products without a
backward.
"""


def turn_on() -> None:
    """Turn the mode on, and select vLLM's first model runner.

    Call this before vLLM is imported, because some of its modules read the variable only once. The
    first runner's sampler calls torch's `log_softmax`, as the learner does. The second has its own
    kernel.
    """
    os.environ[_VARIABLE] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def batch_invariant() -> bool:
    """Return whether the mode is on in this process."""
    return bool(int(os.environ.get(_VARIABLE, "0")))


def kernel_arguments() -> dict[str, Any]:
    """Return the arguments of vLLM's `KernelConfig`, the same for engine and learner.

    In batch-invariant mode they select Humming for int4 and int8 weights, because Machete and
    Marlin split sums depending on the batch. Otherwise there are none and vLLM chooses; before 0.30
    it does not take this argument.
    """
    if not batch_invariant():
        return {}
    return {"linear_backend_per_quant": {"mixed_precision": "humming"}}
