"""Learner and sampler equal to the last bit (`bitwise`): what has to be on for it, before vLLM is imported."""

import torch

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.quant.runtime.batch_invariance import FIRST_CAPABILITY, turn_on


def enable_batch_invariance(config: RunConfig) -> None:
    """Turn vLLM's batch-invariant mode on in this process, where the run is `bitwise` and on a GPU; on CPUs there is
    nothing to turn on. Raises `ConfigError` for a GPU where nothing can be learned in that mode."""
    if not (config.bitwise and torch.cuda.is_available()):
        return
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CAPABILITY:
        raise ConfigError(
            f"bitwise true on a GPU of compute capability {capability[0]}.{capability[1]}: below 9.0 vLLM's "
            "batch-invariant mode replaces torch's linear and matmul, for the whole process, by products without a "
            "backward; leave bitwise out"
        )
    turn_on()
