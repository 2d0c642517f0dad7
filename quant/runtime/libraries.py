"""Which optional libraries there are, asked once."""

import functools
from importlib.util import find_spec


@functools.cache
def has_vllm() -> bool:
    """Whether vLLM is installed; imports nothing."""
    return find_spec("vllm") is not None


RECEIVED = "QARL_RECEIVED"
"""Variable of the environment of a replica's processes: its own folder of versions that it is sent, one at a time."""
SETTLED = "QARL_SETTLES_VLLM"
"""Variable of the environment, set in processes whose vLLM a learner has to follow (`quant.kernels.vllm_gpu`)."""
