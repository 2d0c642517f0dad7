"""Step from the masters' gradients, in one process or in several that share the masters.

Nothing reads masters but their own step: forward and backward multiply codes, of which every
process has all. So several processes share each master by rows, as torch's `DTensor`
(`quant.runtime.shards`); a process has its rows, their gradient and their moments. A step
communicates

    gradients   fp32, a layer at a time in the backward, each row to its process; no process ever
                has a whole gradient (`learner.reduce_dtype bfloat16`: rounded once before sending)
    codes       once a weight version, quantized by the rows' processes and gathered: an eighth of
                the masters in int4
    Muon        an update's rows to the process that orthogonalizes the matrix, and back, in
                bfloat16

`learner.deepspeed` has masters whole and DeepSpeed step them (`learner.optim.deepspeed`).

Every optimizer, master dtype and rounding works in any number of processes. A plain master (an
adapter's factors) is whole in every process, which sums its gradient after the backward. No process
ever holds a whole model (`quant.checkpoint.read_rows`).
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from qarl.configs.deepspeed_file import read_deepspeed_file
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.deepspeed import DeepSpeedOptimizer
from qarl.learner.optim.optimizer import MasterOptimizer, Step, require_same_masters
from qarl.learner.processes import Processes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import mesh_of_all, own_rows, shard_of
from qarl.quant.schemes import MASTER_DTYPES


class ShardedOptimizer:
    """Optimizer of the masters of one model.

    A process steps the rows that it has read (`masters_mesh`). All processes call every method
    together, in the same order.
    """

    def __init__(self, model: LowBitModel, config: LearnerConfig, processes: Processes):
        self._model = model
        self._processes = processes
        self.optimizer = MasterOptimizer(
            model.masters, model.matrices(), config.optimizer, processes
        )
        model.gradients.configure(
            in_place=processes.world == 1, reduce_dtype=MASTER_DTYPES[config.reduce_dtype]
        )

    @property
    def lr(self) -> float:
        """Learning rate of the steps to come."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self.optimizer.lr = rate

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Run the backward of a micro-batch. last: whether it is the update's last one."""
        loss.backward()

    def step(self, diagnose: bool = False) -> Step:
        """Clip and step, then drop the gradients. diagnose: count lost updates."""
        for master in self._model.masters.values():
            # The backward has summed the gradient of a shared master already.
            if master.grad is not None and shard_of(master) is None:
                self._processes.all_reduce(master.grad)
        result = self.optimizer.clipped_step(diagnose)
        self.optimizer.zero_grad()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return `masters`, and `moments` and `generators` of `MasterOptimizer.state_dict`.

        Tensors of a shared master are shared, so torch.distributed.checkpoint writes each row once,
        and reads it into any number of processes.
        """
        masters = {name: master.detach() for name, master in self._model.masters.items()}
        return {"masters": masters, **self.optimizer.state_dict()}

    def empty_state(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Return tensors into which a checkpoint with these shapes is read.

        Its masters are read into the policy's own, the rest into tensors without values. Raises
        `ConfigError` if the shapes are of other masters.
        """
        require_same_masters(shapes["masters"], self._model.masters)
        masters = {name: master.detach() for name, master in self._model.masters.items()}
        return {"masters": masters, **self.optimizer.empty_state(shapes)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of as many processes, whose moments are used from now on.

        Raises `ConfigError` if it belongs to other masters.
        """
        require_same_masters(state["masters"], self._model.masters)
        for name, master in self._model.masters.items():
            own_rows(master).copy_(own_rows(state["masters"][name]))
        self.optimizer.load_state_dict(state)


def masters_mesh(config: LearnerConfig, processes: Processes) -> DeviceMesh | None:
    """Return the mesh of the processes that share the masters; None: each has all of them.

    Several processes share them, unless they are LoRA's frozen base in the host's memory
    (`learner.lora.base`), or stepped by DeepSpeed.
    """
    if processes.world == 1 or config.base_on_host or config.deepspeed is not None:
        return None
    return mesh_of_all(processes.device)


def open_optimizer(
    model: LowBitModel, config: LearnerConfig, processes: Processes
) -> ShardedOptimizer | DeepSpeedOptimizer:
    """Return the optimizer that a `learner` section asks for, of a model's masters.

    Raises `ConfigError` for a DeepSpeed file that this run or machine cannot follow.
    """
    if config.deepspeed is None:
        return ShardedOptimizer(model, config, processes)
    return DeepSpeedOptimizer(model, config, processes, read_deepspeed_file(config.deepspeed))
