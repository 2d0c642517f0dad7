"""vLLM's batch-invariant mode on GPUs: kernels whose sums over a row do not depend on the rows
computed beside it.

vLLM reads one variable of the environment wherever it chooses a kernel, in Python and in its
operators; the learner's operators read the same. Source: vLLM 0.32,
`vllm.model_executor.determinism.batch_invariant`.
"""

import os
from typing import Any

_VARIABLE = "VLLM_BATCH_INVARIANT"

BATCH_INVARIANT = "batch-invariant"
"""Part of a kernel's name where the mode is on and the kernel keeps it."""

FIRST_CAPABILITY = (9, 0)
"""Below it vLLM puts products without a backward in the place of torch's `linear` and `matmul`, for
the process.
"""


def turn_on() -> None:
    """To be called before vLLM is imported: some of its modules read the variable once. Log-probs
    are then those of the runner whose sampler calls torch's `log_softmax`, as the learner does; the
    other has a kernel of its own.
    """
    os.environ[_VARIABLE] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def batch_invariant() -> bool:
    """Whether the mode is on in this process."""
    return bool(int(os.environ.get(_VARIABLE, "0")))


def kernel_arguments() -> dict[str, Any]:
    """Of vLLM's `KernelConfig`, for engine and learner alike: in batch-invariant mode the backend
    of int4 and int8 weights, of which Machete and Marlin split sums by the batch, and Humming need
    not. Nothing where vLLM is to choose: before 0.30 it takes no such argument.
    """
    return {"linear_backend_per_quant": {"mixed_precision": "humming"}} if batch_invariant() else {}
