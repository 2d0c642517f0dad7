"""Step from the masters' gradients, in one process or in several under ZeRO.

    stage 0   every process sums all gradients after the backward, and steps every master
    stage 1   each process receives the sum of its rows of a gradient, keeps their moments and steps
              them; the stepped rows are gathered
    stage 2   the same, and a gradient is summed as soon as the backward has computed it; the rows
              of other processes are then released
    stage 3   masters are divided, too

At stage 3 nothing reads masters but their own step: forward and backward multiply codes, of which
every process has all. So a master's rows, gradient and moments stay with their process
(`quant.runtime.shards`). A step communicates

    gradients   fp32, a layer at a time in the backward, each row to its process; no process ever
                has a whole gradient (`learner.reduce_dtype bfloat16`: rounded once before sending)
    codes       once a weight version, quantized by the rows' processes and gathered: an eighth of
                the masters in int4
    Muon        an update's rows to the process that orthogonalizes the matrix, and back, in
                bfloat16

Every optimizer, master dtype and rounding works at every stage. A divided master is a DTensor. A
plain one at stage 3 (an adapter's factors) is whole in every process, as at stage 0. No process
ever holds a whole model (`quant.checkpoint.read_rows`).
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.optimizer import MasterOptimizer, Step, require_same_masters
from qarl.learner.processes import Processes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import mesh_of_all, own_rows, rows_of, shard_of, shared_like
from qarl.quant.schemes import MASTER_DTYPES


class ShardedOptimizer:
    """Optimizer of the masters of one model.

    At stage 3 a process steps the rows that it has read (`masters_mesh`). All processes call every
    method together, in the same order.
    """

    def __init__(self, model: LowBitModel, config: LearnerConfig, processes: Processes):
        self._model = model
        self._processes = processes
        self._rows: dict[str, nn.Parameter] = model.masters
        """What this process steps, by the master's name: the master, or its rows of it."""
        if config.zero_stage in (1, 2) and processes.world > 1:
            self._rows = rows_of(model.masters, mesh_of_all(model.device))
            for name, master in model.masters.items():
                master.grad_dtype = torch.float32
                if config.zero_stage == 2 and master.requires_grad:
                    master.register_post_accumulate_grad_hook(
                        partial(self._reduce, self._rows[name])
                    )
        self.optimizer = MasterOptimizer(self._rows, model.matrices(), config.optimizer, processes)
        single = processes.world == 1 and config.zero_stage is None
        model.gradients.configure(in_place=single, reduce_dtype=MASTER_DTYPES[config.reduce_dtype])

    def step(self, diagnose: bool = False) -> Step:
        """Clip and step, then drop the gradients. diagnose: count lost updates."""
        for name, master in self._model.masters.items():
            rows = self._rows[name]
            shard = shard_of(rows)
            if master.grad is not None and shard is None:
                self._processes.total(master.grad)
            elif master.grad is not None and shard is not None and rows is not master:
                rows.grad = shared_like(shard.reduce(master.grad)(), rows)
                master.grad = None
        result = self.optimizer.clipped_step(diagnose)
        self.optimizer.zero_grad()
        if not result.taken:
            return result
        for name, master in self._model.masters.items():
            shard = shard_of(self._rows[name])
            if shard is not None and self._rows[name] is not master:
                shard.gather(master.detach())
        return result

    def _reduce(self, rows: nn.Parameter, master: torch.Tensor) -> None:
        """Start to sum a master's gradient into that of `rows`, while the backward continues."""
        gradient = master.grad
        master.grad = None
        assert gradient is not None
        self._model.gradients.make_way(rows)
        self._model.gradients.delivered(rows, gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return `masters`, and `moments` and `generators` of `MasterOptimizer.state_dict`.

        Tensors of a shared master are shared, so torch.distributed.checkpoint writes each row once,
        and reads it into any stage and number of processes.
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

    They are shared if `learner.zero_stage` is 3.
    """
    return mesh_of_all(processes.device) if config.zero_stage == 3 else None
