"""vLLM's batch-invariant mode on GPUs: kernels whose sums over a row do not depend on the rows computed beside it.

vLLM reads one variable of the environment wherever it chooses a kernel, in Python and in its operators; the learner's
operators read the same. Source: vLLM 0.32, `vllm.model_executor.determinism.batch_invariant`.
"""

import os
from typing import Literal

_VARIABLE = "VLLM_BATCH_INVARIANT"

BATCH_INVARIANT = "batch-invariant"
"""Part of a kernel's name where the mode is on and the kernel keeps it."""

FIRST_CAPABILITY = (9, 0)
"""Below it vLLM puts products without a backward in the place of torch's `linear` and `matmul`, for the process."""


def turn_on() -> None:
    """To be called before vLLM is imported: some of its modules read the variable once. Log-probs are then those of the
    runner whose sampler calls torch's `log_softmax`, as the learner does; the other has a kernel of its own."""
    os.environ[_VARIABLE] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def batch_invariant() -> bool:
    """Whether the mode is on in this process."""
    return bool(int(os.environ.get(_VARIABLE, "0")))


def linear_backends() -> dict[str, Literal["humming"]] | None:
    """vLLM's backends by kind of weights, for engine and learner alike; None where vLLM is to choose. Of the kernels
    for int4 and int8 weights, Machete and Marlin split sums by the batch, and Humming need not."""
    return {"mixed_precision": "humming"} if batch_invariant() else None
