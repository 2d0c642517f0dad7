"""Step the masters by DeepSpeed's ZeRO 1 or 2, as a user's own file says (`learner.deepspeed`).

Every process has all masters, in fp32. DeepSpeed owns their gradients, moments and step: it sums a
gradient over the processes, each of which steps its part of one flat tensor and gathers the rest.
Forward and backward are the learner's; DeepSpeed's hooks on the masters see the straight-through
gradients. It never casts a master, because codes would be made of the rounded one.

Checkpoints are the run's own, in the same layout as without DeepSpeed (`learner.optim.sharded`). So
a run can be resumed with DeepSpeed or without, in any number of processes.
"""

import math
import os
import warnings
from typing import Any

import torch
from torch import nn

from qarl.configs.deepspeed_file import DeepSpeedFile
from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.optimizer import Step, require_same_masters
from qarl.learner.processes import Processes
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import mesh_of_all, row_a_process, share, whole_value

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments, in torch and in DeepSpeed."""


class DeepSpeedOptimizer:
    """Optimizer of the masters of one model; the methods are those of `ShardedOptimizer`.

    Args:
        model: its masters are fp32, and become views of DeepSpeed's flat tensor.
        file: the user's file. Raises `ConfigError` if its offload cannot be compiled here.
    """

    def __init__(
        self,
        model: LowBitModel,
        config: LearnerConfig,
        processes: Processes,
        file: DeepSpeedFile,
    ):
        self._masters = model.masters
        self._processes = processes
        device = model.device
        deepspeed = _import_deepspeed(device)
        # DeepSpeed wants a launcher's variable, also in a single process.
        os.environ.setdefault("LOCAL_RANK", str(processes.local_rank))
        model.gradients.configure(in_place=False)
        for master in self._masters.values():
            master.grad_dtype = torch.float32
        self._engine, *_ = deepspeed.initialize(
            model=_Holder(list(self._masters.values())),
            optimizer=_adamw(self._masters, config, file, deepspeed, device),
            config={
                # A micro-batch's loss is its share of the mini-batch's, so DeepSpeed divides by
                # nothing; where an update ends is said by `backward`.
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": config.optimizer.grad_clip,
                "steps_per_print": 10**9,
                "zero_allow_untested_optimizer": True,  # torch's AdamW, fused
                **file.settings,
            },
            dist_init_required=False,
        )
        self._zero = self._engine.optimizer

    @property
    def lr(self) -> float:
        """Learning rate of the steps to come."""
        return self._zero.param_groups[0]["lr"]

    @lr.setter
    def lr(self, rate: float) -> None:
        for group in self._zero.param_groups:
            group["lr"] = rate

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Run the backward of a micro-batch. last: whether it is the update's last one."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the processes, while the loss is a share of a sum.
        self._engine.backward(self._engine(loss * self._processes.world))

    def step(self, diagnose: bool = False) -> Step:
        """Clip and step, unless the gradient's norm is infinite or NaN; then drop the gradients.

        diagnose: has no effect, because DeepSpeed does not say which weights it changed.
        """
        self._engine.step()
        taken = not self._zero.overflow
        norm = float(self._engine.get_global_grad_norm() or 0.0) if taken else math.inf
        return Step(norm, taken)

    def state_dict(self) -> dict[str, Any]:
        """Return what `ShardedOptimizer.state_dict` returns; a collective call."""
        from deepspeed.utils import safe_get_full_optimizer_state

        moments: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self._masters}
        if self._steps() is not None:
            for name, master in self._masters.items():
                for key in _MOMENTS:
                    moment = safe_get_full_optimizer_state(master, key)
                    assert moment is not None, f"DeepSpeed has no {key} of {name}"
                    moments[name][key] = self._shared(moment.view_as(master))
                moments[name]["step"] = torch.tensor(float(self._steps() or 0))
        # The run's own optimizer rounds 16-bit masters by a generator, and these are in fp32.
        unused = torch.Generator().manual_seed(self._processes.rank).get_state()
        several = self._processes.world > 1
        return {
            "masters": {name: self._shared(master) for name, master in self._masters.items()},
            "moments": moments,
            "generators": row_a_process(unused) if several else unused[None],
        }

    def empty_state(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Return tensors into which a checkpoint with these shapes is read.

        Raises `ConfigError` if the shapes are of other masters, or of moments that are not AdamW's.
        """
        require_same_masters(shapes["masters"], self._masters)
        state: dict[str, Any] = {"masters": {}, "moments": {}}
        for name, master in self._masters.items():
            keys = shapes["moments"].get(name, {})
            if not keys.keys() <= {"step", *_MOMENTS}:
                raise ConfigError(
                    f"the checkpoint has {', '.join(sorted(keys))} of {name!r}, which are not"
                    " AdamW's; resume without learner.deepspeed"
                )
            empty = torch.empty_like(master, device="cpu")
            state["masters"][name] = self._shared(empty)
            state["moments"][name] = {
                key: self._shared(empty) if shape else torch.empty(())
                for key, shape in keys.items()
            }
        return {
            **state,
            "generators": torch.empty(shapes["generators"], dtype=torch.uint8),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, also of a run without DeepSpeed; a collective call.

        Raises `ConfigError` if it belongs to other masters.
        """
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        require_same_masters(state["masters"], self._masters)
        steps = {float(values["step"]) for values in state["moments"].values() if values}
        if len(steps) > 1:
            raise ConfigError(
                f"the checkpoint's masters were stepped {sorted(steps)} times, each a number of its"
                " own, and DeepSpeed counts for all; resume without learner.deepspeed"
            )
        for count in steps:
            self._start_moments(count)
        for name, master in self._masters.items():
            value = whole_value(state["masters"][name]).to(master.device)
            master.copy_(value)
            safe_set_full_fp32_param(master, value)
            for key in _MOMENTS if steps else ():
                moment = whole_value(state["moments"][name][key])
                safe_set_full_optimizer_state(master, moment.to(master.device), key)

    def _steps(self) -> float | None:
        """Return how many steps AdamW took; None before the first."""
        states = [state for state in self._zero.optimizer.state.values() if "step" in state]
        return float(states[0]["step"]) if states else None

    def _start_moments(self, steps: float) -> None:
        """Create AdamW's state, which it would create at its first step, after `steps` steps."""
        inner = self._zero.optimizer
        by_torch = isinstance(inner, torch.optim.AdamW)
        for group in inner.param_groups:
            for part in group["params"]:
                state = {key: torch.zeros_like(part.detach()) for key in _MOMENTS}
                # DeepSpeed's CPU Adam counts by an integer
                count = torch.tensor(steps, device=part.device) if by_torch else int(steps)
                inner.state[part] = {"step": count, **state}
        self._zero._lazy_init_hp_params_optimizer_state()

    def _shared(self, full: torch.Tensor) -> torch.Tensor:
        """Return this process's rows of a full tensor, on the host, as `ShardedOptimizer` has them.

        One process has all of it.
        """
        full = full.detach().cpu()
        if self._processes.world == 1 or not full.ndim:
            return full.clone()
        mesh = mesh_of_all(torch.device("cpu"))
        return share(nn.Parameter(full), mesh).detach()


class _Holder(nn.Module):
    """The module that DeepSpeed wraps: it has the masters, and passes the learner's loss on."""

    def __init__(self, masters: list[nn.Parameter]):
        super().__init__()
        self.masters = nn.ParameterList(masters)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return loss


def _adamw(
    masters: dict[str, nn.Parameter],
    config: LearnerConfig,
    file: DeepSpeedFile,
    deepspeed: Any,
    device: torch.device,
) -> torch.optim.Optimizer:
    """Return AdamW for the masters: torch's, or DeepSpeed's for the host if the file offloads."""
    settings: dict[str, Any] = {
        "lr": config.optimizer.lr,
        "betas": config.optimizer.betas,
        "weight_decay": config.optimizer.weight_decay,
    }
    if not file.offloads:
        return torch.optim.AdamW(masters.values(), fused=True, **settings)
    try:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(list(masters.values()), **settings)
    except Exception as error:  # whatever its compiler says, of many types
        reason = str(error).strip().splitlines()
        raise ConfigError(
            "learner.deepspeed offloads the optimizer, for which DeepSpeed compiles its CPU Adam,"
            f" and that failed: {reason[-1] if reason else type(error).__name__}; install a C++"
            " compiler and ninja, or set offload_optimizer.device none"
        ) from error


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for the device's kind.

    Raises `ConfigError` if it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__
    except ImportError as error:
        raise ConfigError(
            f"learner.deepspeed needs DeepSpeed ({error}); install the extra: pip install"
            " 'qarl-train[cpu]' or [cuda], or omit it"
        ) from error
    # DeepSpeed 0.19 calls torch's collectives by names that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    if device.type == "cpu":
        # DeepSpeed compiles its all-reduce through shared memory for a minute at the first use,
        # and this engine's messages are few.
        __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
