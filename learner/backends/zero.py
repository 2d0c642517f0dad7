"""DeepSpeed: the masters' gradients reduced over processes, and under ZeRO 1-3 what is sharded.

    stage 0   nothing; every process steps all masters with `MasterOptimizer`, so every optimizer and rounding works
    stage 1   the optimizer's moments and one fp32 copy of the masters
    stage 2   the gradients as well
    stage 3   the masters as well: they are gathered layer by layer, to be materialized and while autograd needs them

The codes of a weight version, and the compute-dtype copies of embeddings and norms, are whole in every process: its own
engine samples from the same. What is divided over processes is a mini-batch's list of micro-batches; DeepSpeed averages
gradients, so a loss share counts `world` times.
"""

import math
from typing import Any

import torch
from torch import nn

from learner.backends.zero_config import deepspeed_config
from learner.master_step import adamw
from learner.optim import MasterOptimizer, Step, require_same_masters
from learner.processes import Processes
from qarl.config import ConfigError, LearnerConfig
from quant.model import LowBitModel
from quant.partitioned import gathered

_MOMENTS = ("exp_avg", "exp_avg_sq")


def quiet_deepspeed() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce (a minute, and a C++ compiler) where gloo does, and
    from logging every setting."""
    import logging

    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class Zero:
    """See `learner.backends.Backend`. Raises `ConfigError` for settings that DeepSpeed cannot honour."""

    def __init__(self, model: LowBitModel, config: LearnerConfig, processes: Processes):
        import deepspeed

        settings = deepspeed_config(config)
        self._model, self._processes, self._lr = model, processes, config.optimizer.lr
        trained = list(model.masters.values())
        parameters: Any = trained  # DeepSpeed annotates a module
        self._whole: _WholeStep | None = None
        if not config.zero_stage:
            self._whole = _WholeStep(MasterOptimizer(model.masters, model.matrices(), config.optimizer), trained)
        optimizer = self._whole or adamw(trained, config.optimizer)
        quiet_deepspeed()
        self.policy: Any
        self._optimizer: Any
        self.policy, self._optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters, optimizer=optimizer, config=settings, dist_init_required=False
        )

    def backward(self, loss: torch.Tensor) -> None:
        """See `Backend.backward`."""
        self.policy.backward(loss * self._processes.world)

    def step(self, lr_factor: float, diagnose: bool = False) -> Step:
        """See `Backend.step`."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * lr_factor
        if self._whole is not None:
            self._whole.lr_factor, self._whole.diagnose = lr_factor, diagnose
            self.policy.step()
            return self._whole.done
        self.policy.step()
        norm = float(self.policy.get_global_grad_norm())
        return Step(norm, math.isfinite(norm) and not self._optimizer.overflow)

    def state_dict(self) -> dict[str, Any]:
        """See `Backend.state_dict`."""
        optimizer: dict[str, Any] = {"masters": {}, "generator": None}
        steps = self._whole.optimizer.state_dict() if self._whole is not None else None
        if steps is not None:
            optimizer["generator"] = steps["generator"]
        masters = {}
        for number, (name, master) in enumerate(self._model.masters.items()):
            with gathered([master]):
                whole = master.detach().clone()
            moments = self._moments(master) if steps is None else steps["masters"][name]
            if number % self._processes.world == self._processes.rank:
                masters[name], optimizer["masters"][name] = whole, moments
        return {"masters": masters, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Backend.load_state_dict`."""
        from deepspeed.utils import safe_set_full_fp32_param

        for name, master in self._model.masters.items():
            saved = state["masters"][name].to(self._model.device)
            with torch.no_grad(), gathered([master], modified=True):
                master.copy_(saved)
            if self._whole is None:
                safe_set_full_fp32_param(master, saved)
        if self._whole is not None:
            self._whole.optimizer.load_state_dict(state["optimizer"])
            return
        require_same_masters(state["optimizer"], self._model.masters)
        self._load_moments(state["optimizer"]["masters"])

    def _moments(self, master: nn.Parameter) -> dict[str, Any]:
        """As `MasterStep.state_dict`, put together from all processes."""
        from deepspeed.utils import safe_get_full_optimizer_state

        stepped = list(self._optimizer.optimizer.state.values())
        if not stepped:
            return {"moments": [{}], "remainder": None}
        found = {key: safe_get_full_optimizer_state(master, key) for key in _MOMENTS}
        return {"moments": [{"step": stepped[0]["step"].clone(), **found}], "remainder": None}

    def _load_moments(self, saved: dict[str, Any]) -> None:
        """saved: name → as `MasterStep.state_dict`. Every process takes its share."""
        from deepspeed.utils import safe_set_full_optimizer_state

        zero = self._optimizer
        count = _common_step(saved)
        zero.optimizer.state.clear()
        if count is None:
            return
        stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        for flat in zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups:
            moments = {key: torch.zeros_like(flat, requires_grad=False) for key in _MOMENTS}
            zero.optimizer.state[flat] = {"step": count.to(flat.device, copy=True), **moments}
        if not stage3:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        for name, master in self._model.masters.items():
            for key in _MOMENTS:
                safe_set_full_optimizer_state(master, saved[name]["moments"][0][key].to(self._model.device), key)


def _common_step(saved: dict[str, Any]) -> torch.Tensor | None:
    """The step count of all masters, None before the first step. Raises `ConfigError` where it is not one, or where the
    moments are not AdamW's: ZeRO 1-3 have one flat AdamW for all masters."""
    first = {name: state["moments"][0] for name, state in saved.items()}
    counts = {float(moments["step"]) for moments in first.values() if "step" in moments}
    if not any(first.values()):
        return None
    other = next((name for name, moments in first.items() if moments.keys() != {"step", *_MOMENTS}), None)
    if other is not None or len(counts) != 1:
        what = f"master {other!r} has no AdamW moments" if other else f"masters are at steps {sorted(counts)}"
        raise ConfigError(
            f"the checkpoint cannot go on under learner.zero_stage 1, 2 or 3: {what}, and ZeRO steps all masters by "
            "one AdamW; resume with learner.zero_stage 0"
        )
    return next(m["step"] for m in first.values())


class _WholeStep(torch.optim.Optimizer):
    """`MasterOptimizer` for DeepSpeed's stage 0, which calls `step` once gradients are averaged."""

    def __init__(self, optimizer: MasterOptimizer, masters: list[nn.Parameter]):
        super().__init__(masters, {"lr": 0.0})
        self.optimizer = optimizer
        self.lr_factor, self.diagnose = 1.0, False
        self.done = Step(0.0, False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and step."""
        self.done = self.optimizer.clipped_step(self.lr_factor, self.diagnose)
