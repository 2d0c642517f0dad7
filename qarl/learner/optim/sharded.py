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
from qarl.learner.optim.master_step import on_host
from qarl.learner.optim.muon import MOMENTUM
from qarl.learner.optim.optimizer import (
    MasterOptimizer,
    Step,
    matrices_of,
    muon_masters,
    require_same_masters,
)
from qarl.learner.processes import Processes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import (
    fill,
    mesh_of_all,
    own_rows,
    rows_of,
    shard_of,
    shared_like,
    whole_value,
)
from qarl.quant.schemes import MASTER_DTYPES

_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        self._matrices = muon_masters(model.masters, model.matrices(), config.optimizer)
        """Names of the masters that Muon takes."""

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
        """Return masters and optimizer by name, each master in one process only.

        The state is independent of the stage and of the number of processes.
        """
        mine = self.optimizer.state_dict()
        generators = torch.stack(self._processes.gathered(mine["generator"]))
        own_moments = {name: state["moments"] for name, state in mine["masters"].items()}
        stepped_here = {name for name, moments in own_moments.items() if any(moments)}
        stepped = set().union(*self._processes.gathered(stepped_here))
        masters = {}
        steps = {}
        # Every process gathers every master, but stores only its turn's, so that none holds all.
        for number, (name, master) in enumerate(self._rows.items()):
            cut = shard_of(master) is not None
            value = whole_value(master) if cut else master.detach()
            moments = self._whole_moments(name, master, own_moments[name], name in stepped)
            if number % self._processes.world == self._processes.rank:
                masters[name] = value.cpu() if cut else value
                steps[name] = {"moments": on_host(moments) if cut else moments}
        optimizer = {"masters": steps, "generator": generators}
        return {"masters": masters, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict`s of all processes, put together.

        Raises `ConfigError` if they belong to other masters.
        """
        require_same_masters(state["optimizer"], self._model.masters)
        steps = {}
        for name, master in self._model.masters.items():
            shard = shard_of(master)
            saved = state["masters"][name].to(self._model.device)
            with torch.no_grad():
                own_rows(master).copy_(saved if shard is None else shard.rows(saved))
            moments = state["optimizer"]["masters"][name]["moments"]
            steps[name] = {"moments": self._own_moments(name, self._rows[name], moments)}
        self.optimizer.load_state_dict({**state["optimizer"], "masters": steps})

    def _keys(self, name: str) -> tuple[str, ...]:
        """Return the names of a master's moments in torch's state."""
        return (MOMENTUM,) if name in self._matrices else _MOMENTS

    def _whole_moments(
        self, name: str, master: nn.Parameter, mine: list[dict[str, Any]], stepped: bool
    ) -> list[dict[str, Any]]:
        """Return the moments of the whole master, as `MasterStep.state_dict` has them.

        Moments of several matrices are views of one tensor.

        Args:
            mine: moments of this process's rows.
            stepped: whether any process has moments of this master.
        """
        shard = shard_of(master)
        if shard is None:
            return mine
        indices = list(matrices_of(name, shard.shape)) if name in self._matrices else [()]
        if not stepped:
            return [{} for _ in indices]
        gathered = {}
        for key in self._keys(name):
            parts = [part[key].flatten() for part in mine if key in part]
            rows = torch.cat(parts or [torch.empty(0, device=master.device)])
            buffer = torch.empty(shard.shape, device=master.device)
            gathered[key] = fill(buffer, rows.view(own_rows(master.detach()).shape), shard)
        counts = {} if name in self._matrices else {"step": mine[0]["step"]}
        moments = []
        for index in indices:
            views = {key: tensor[index] for key, tensor in gathered.items()}
            moments.append({**counts, **views})
        return moments

    def _own_moments(
        self, name: str, master: nn.Parameter, saved: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the moments of this process's rows, the inverse of `_whole_moments`."""
        shard = shard_of(master)
        if shard is None:
            return saved
        own_shape = own_rows(master.detach()).shape
        indices = list(matrices_of(name, own_shape)) if name in self._matrices else [()]
        if not any(saved) or not indices:
            return [{} for _ in indices or [()]]
        own = {}
        for key in self._keys(name):
            whole = torch.cat([part[key].flatten() for part in saved]).view(shard.shape)
            own[key] = shard.rows(whole)
        counts = {} if name in self._matrices else {"step": saved[0]["step"]}
        moments = []
        for index in indices:
            copies = {key: tensor[index].clone() for key, tensor in own.items()}
            moments.append({**counts, **copies})
        return moments


def masters_mesh(config: LearnerConfig, processes: Processes) -> DeviceMesh | None:
    """Return the mesh of the processes that share the masters; None: each has all of them.

    They are shared if `learner.zero_stage` is 3.
    """
    return mesh_of_all(processes.device) if config.zero_stage == 3 else None
