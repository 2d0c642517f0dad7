"""DeepSpeed: the masters' gradients reduced over processes, and what is sharded under ZeRO 1 and 2.

    stage 1   the optimizer's moments and one fp32 copy of the masters
    stage 2   the gradients as well
    0 and 3   nothing, and the masters as well, which is `learner.backends.native`

The codes of a weight version, and the compute-dtype copies of embeddings and norms, are whole in every process: its own
engine samples from the same. What is divided over processes is a mini-batch's list of micro-batches; DeepSpeed averages
gradients, so a loss share counts `world` times.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.backends.partitioned_muon import PartitionedMuon, pieces_of
from qarl.learner.backends.zero_loading import deepspeed_settings, quiet_deepspeed
from qarl.learner.optim.master_step import adamw, on_host
from qarl.learner.optim.muon import MOMENTUM
from qarl.learner.optim.optimizer import Step, matrices_of, muon_masters, require_same_masters
from qarl.learner.processes import Processes
from qarl.quant.model.low_bit_model import LowBitModel

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero:
    """See `learner.backends.Backend`."""

    def __init__(self, model: LowBitModel, config: LearnerConfig, processes: Processes):
        import deepspeed

        self._model, self._processes = model, processes
        trained = list(model.masters.values())
        self._matrices: dict[str, nn.Parameter] = {}
        if config.optimizer.name == "muon":
            matrices = muon_masters(model.masters, model.matrices(), config.optimizer)
            self._matrices = {name: model.masters[name] for name in matrices}
            rest = [master for name, master in model.masters.items() if name not in self._matrices]
            optimizer = PartitionedMuon(self._matrices, rest, config.optimizer, processes)
        else:
            optimizer = adamw(trained, config.optimizer)
        quiet_deepspeed()
        self.policy: Any
        self._optimizer: Any
        parameters: Any = trained  # DeepSpeed annotates a module
        self.policy, self._optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters, optimizer=optimizer, config=deepspeed_settings(config),
            dist_init_required=False,
        )  # fmt: skip
        if isinstance(optimizer, PartitionedMuon):
            optimizer.place(pieces_of(self._optimizer, self._matrices, processes.rank))

    def backward(self, loss: torch.Tensor) -> None:
        """See `Backend.backward`."""
        self.policy.backward(loss * self._processes.world)

    def set_learning_rate(self, lr: float) -> None:
        """See `Backend.set_learning_rate`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self, diagnose: bool = False) -> Step:
        """See `Backend.step`."""
        self.policy.step()
        norm = float(self.policy.get_global_grad_norm())
        return Step(norm, math.isfinite(norm) and not self._optimizer.overflow)

    def state_dict(self) -> dict[str, Any]:
        """See `Backend.state_dict`."""
        optimizer: dict[str, Any] = {"masters": {}, "generator": None}
        self._link()
        masters = {}
        for number, (name, master) in enumerate(self._model.masters.items()):
            moments = self._moments(name, master)
            if number % self._processes.world == self._processes.rank:
                masters[name] = master.detach().to("cpu", copy=True)
                optimizer["masters"][name] = {"moments": on_host(moments)}
        return {"masters": masters, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Backend.load_state_dict`."""
        from deepspeed.utils import safe_set_full_fp32_param

        for name, master in self._model.masters.items():
            saved = state["masters"][name].to(self._model.device)
            with torch.no_grad():
                master.copy_(saved)
            safe_set_full_fp32_param(master, saved)
        require_same_masters(state["optimizer"], self._model.masters)
        self._load_moments(state["optimizer"]["masters"])

    def _link(self) -> None:
        """Let stages 1 and 2 find each master's moments; DeepSpeed does so after the first of several param groups is
        stepped for the first time, when the others have none."""
        if hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state") and self._optimizer.optimizer.state:
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _moments(self, name: str, master: nn.Parameter) -> list[dict[str, Any]]:
        """As `MasterStep.state_dict`, put together from all processes."""
        from deepspeed.utils import safe_get_full_optimizer_state

        indices = list(matrices_of(name, master.shape)) if name in self._matrices else [()]
        states = list(self._optimizer.optimizer.state.values())
        if not any(states):
            return [{} for _ in indices]
        if name in self._matrices:
            whole = safe_get_full_optimizer_state(master, MOMENTUM)
            assert whole is not None
            return [{MOMENTUM: whole[index]} for index in indices]
        moments = {key: safe_get_full_optimizer_state(master, key) for key in _MOMENTS}
        count = next(state["step"] for state in states if "step" in state)
        return [{"step": count, **moments}]

    def _load_moments(self, saved: dict[str, Any]) -> None:
        """saved: name → as `MasterStep.state_dict`. Every process takes its share."""
        from deepspeed.utils import safe_set_full_optimizer_state

        zero = self._optimizer
        steps = _common_steps(saved, self._matrices)
        zero.optimizer.state.clear()
        if steps is None:
            return
        for number, flat in enumerate(zero.single_partition_of_fp32_groups):
            group = zero.optimizer.param_groups[number]
            whole = group.get("whole", False)
            moments = {key: torch.zeros_like(flat, requires_grad=False) for key in ((MOMENTUM,) if whole else _MOMENTS)}
            count = {} if whole else {"step": steps.to(flat.device, copy=True)}
            zero.optimizer.state[flat] = {**count, **moments}
        self._link()
        for name, master in self._model.masters.items():
            moments = saved[name]["moments"]
            for key in (MOMENTUM,) if name in self._matrices else _MOMENTS:
                whole = torch.cat([part[key].flatten() for part in moments]).view(master.shape)
                safe_set_full_optimizer_state(master, whole.to(self._model.device), key)


def _common_steps(saved: dict[str, Any], matrices: Collection[str]) -> torch.Tensor | None:
    """AdamW's step count of all masters but `matrices`, which are Muon's; None before the first step. Raises
    `ConfigError` where it is not one, or where moments are another optimizer's: ZeRO 1-3 have one flat AdamW."""
    parts = {name: state["moments"] for name, state in saved.items()}
    if not any(moments for of_process in parts.values() for moments in of_process):
        return None
    counts = {float(of_process[0]["step"]) for of_process in parts.values() if "step" in of_process[0]}
    wanted = {name: {MOMENTUM} if name in matrices else {"step", *_MOMENTS} for name in parts}
    other = next(
        (n for n, of_process in parts.items() if any(moments.keys() != wanted[n] for moments in of_process)), None
    )
    if other is not None or len(counts) > 1:
        optimizer = "Muon" if other in matrices else "AdamW"
        what = f"master {other!r} has no {optimizer} moments" if other else f"masters are at steps {sorted(counts)}"
        raise ConfigError(
            f"the checkpoint cannot go on under learner.zero_stage 1 or 2: {what}, and ZeRO steps all masters of an "
            "optimizer at once; resume with learner.zero_stage 0 or 3"
        )
    return next((of_process[0]["step"] for of_process in parts.values() if "step" in of_process[0]), torch.zeros(()))
