"""Memory for gradients and moments, reserved while the engine starts.

Both are allocated at the first step. On a GPU the engine would be running by then, and a run that
is too large would end in that step, minutes after its start. So their bytes are allocated before
the engine allocates its own. They are then released to torch's allocator, which keeps them for this
process. This has not been run on a GPU yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qarl.configs.errors import QarlError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.optimizer import muon_masters
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import own_rows

_FP32 = 4
"""Bytes of an fp32 number."""


class OutOfMemoryError(QarlError, heading="memory"):
    """A GPU has too little memory for what a step needs."""


def step_bytes(model: LowBitModel, config: LearnerConfig) -> int:
    """Return how many bytes the first step adds to one process's device.

    These are the fp32 gradients and moments of the masters that are trained, or of this process's
    rows of them.
    """
    by_muon = muon_masters(model.masters, model.matrices(), config.optimizer)
    sizes = {name: own_rows(master.detach()).numel() for name, master in model.masters.items()}
    moments = sum(size * (1 if name in by_muon else 2) for name, size in sizes.items())
    if config.optimizer.offload == "cpu":
        moments = 0
    gradients = sum(sizes.values())
    return (gradients + moments) * _FP32


@contextmanager
def reserved(model: LowBitModel, config: LearnerConfig) -> Iterator[None]:
    """Hold `step_bytes` of the masters' GPU within this context; nothing on CPUs, or by DeepSpeed,
    which has allocated its own already.

    Raises `OutOfMemoryError` if there is too little memory.
    """
    if model.device.type == "cpu" or config.deepspeed is not None:
        yield
        return
    count = step_bytes(model, config)
    try:
        memory = torch.empty(count, dtype=torch.uint8, device=model.device)
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(model.device)[0]
        raise OutOfMemoryError(
            f"gradients and moments take {count / 2**30:.1f} GiB, and {model.device} has"
            f" {free / 2**30:.1f} GiB free with the model on it; `qarl plan` with this command's"
            " options names what would help"
        ) from error
    try:
        yield
    finally:
        del memory
