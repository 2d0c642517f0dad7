"""Room for gradients and moments, held while the engine starts.

Both are made at the first step. On a GPU the engine would be up by then, and a run that is too
large would end in that step, minutes after its start; so their bytes are taken before the engine
takes its own, and given back to torch's allocator, which keeps them for this process, once it has.
Not run on a GPU yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qarl.configs.errors import QarlError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.optimizer import muon_masters
from qarl.quant.model.low_bit_model import LowBitModel

_FP32 = 4


class OutOfMemoryError(QarlError, heading="memory"):
    """A GPU without room for what a step needs."""


def step_bytes(model: LowBitModel, config: LearnerConfig, processes: int) -> int:
    """What the first step adds to one process's device: fp32 gradients and moments of the masters
    that are trained, or its share of them; at stage 3 a master is this process's rows of it
    already.
    """
    by_muon = muon_masters(model.masters, model.matrices(), config.optimizer)
    sizes = {name: master.numel() for name, master in model.masters.items()}
    moments = sum(size * (1 if name in by_muon else 2) for name, size in sizes.items())
    if config.optimizer.offload == "cpu":
        moments = 0
    trained, stage = sum(sizes.values()), config.zero_stage or 0
    shares = processes if stage in (1, 2) else 1
    gradients = trained // shares if stage == 2 else trained
    return (gradients + moments // shares) * _FP32


@contextmanager
def reserved(model: LowBitModel, config: LearnerConfig, processes: int) -> Iterator[None]:
    """Hold `step_bytes` of the masters' GPU within this context; none on CPUs. Raises
    `OutOfMemoryError`.
    """
    if model.device.type == "cpu":
        yield
        return
    count = step_bytes(model, config, processes)
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
