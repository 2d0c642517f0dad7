"""Five engines under one surface: masters in, each master's gradient in, stepped masters out.

None of them runs a model. Gradients are delivered one master after another, from the last to the
first, as a straight-through backward delivers them; forward and backward are the same whatever
engine holds the masters.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

Gradients = Iterator[tuple[str, Callable[[], Tensor]]]
"""Names of masters, and functions that compute their gradients, fp32 and of full shape."""
LR = 1e-3
CLIP = 1e9
SETTINGS: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.01}


class Engine(Protocol):
    """What every engine does for the learner."""

    def backward(self, gradients: Gradients, last: bool) -> None:
        """Take the gradients of one micro-batch; last: of the update's last."""

    def step(self) -> float:
        """Clip, step and return the gradient norm."""
        raise NotImplementedError

    def full(self) -> dict[str, Tensor]:
        """Return the full masters by name. Collective."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write a checkpoint. Collective."""

    def load(self, folder: Path) -> None:
        """Restore a checkpoint. Collective."""


class _Deliver(torch.autograd.Function):
    """A gradient's way to a parameter through autograd, without a product."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return ctx.gradient(), None


def _times(factor: int, gradient: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function of the gradient times `factor`."""
    return lambda: gradient().mul_(factor)


class _Holder(nn.Module):
    """A module with one master, whose forward gives it a gradient."""

    def __init__(self, master: Tensor):
        super().__init__()
        self.weight = nn.Parameter(master)

    def forward(self, gradient: Callable[[], Tensor]) -> Tensor:
        """Return a zero whose backward delivers `gradient` to the master."""
        return _Deliver.apply(self.weight, gradient)


class _Holders(nn.Module):
    """A module for each master."""

    def __init__(self, masters: Mapping[str, Tensor]):
        super().__init__()
        self.each = nn.ModuleDict(
            {name.replace(".", "-"): _Holder(master) for name, master in masters.items()}
        )

    def forward(self, gradients: Gradients) -> Tensor:
        """Return a zero whose backward delivers all gradients."""
        zeros = [self.each[name.replace(".", "-")](gradient) for name, gradient in gradients]
        return torch.stack(zeros).sum()

    def names(self) -> dict[str, Any]:
        """Return the masters by name."""
        return {key.replace("-", "."): holder.weight for key, holder in self.each.items()}


class Qarl:
    """QaRL's masters, which are DTensors, and its optimizer."""

    def __init__(self, masters: Mapping[str, Tensor]):
        from qarl.configs.schema.learner import LearnerConfig
        from qarl.learner.optim.sharded import ShardedOptimizer
        from qarl.learner.processes import Processes
        from qarl.quant.layers.gradients import Gradients
        from qarl.quant.runtime.shards import mesh_of_all, share

        rank, world = dist.get_rank(), dist.get_world_size()
        self.processes = Processes(rank, world)
        mesh = mesh_of_all(torch.device("cpu"))
        parameters = {name: share(nn.Parameter(m), mesh) for name, m in masters.items()}
        self.gradients = Gradients()
        self.model: Any = SimpleNamespace(
            masters=parameters,
            matrices=lambda: set(),
            device=torch.device("cpu"),
            gradients=self.gradients,
        )
        optimizer = {"name": "adamw", "lr": LR, "grad_clip": CLIP}
        config = LearnerConfig.model_validate({"optimizer": optimizer})
        self.sharded = ShardedOptimizer(self.model, config, self.processes)

    def backward(self, gradients: Gradients, last: bool) -> None:
        """See `Engine`."""
        for name, gradient in gradients:
            master = self.model.masters[name]
            zero = _Straight.apply(master, gradient(), self.gradients)
            zero.backward()

    def step(self) -> float:
        """See `Engine`."""
        return self.sharded.step().norm

    def full(self) -> dict[str, Tensor]:
        """See `Engine`."""
        from qarl.quant.runtime.shards import whole_value

        return {name: whole_value(p) for name, p in self.model.masters.items()}

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        from qarl.run.checkpoint import save_checkpoint

        save_checkpoint(folder, 1, {"learner": self.sharded.state_dict()}, 1, self.processes)

    def load(self, folder: Path) -> None:
        """See `Engine`."""
        from qarl.run.checkpoint import load_checkpoint

        checkpoint = load_checkpoint(folder, self.processes)
        learner: Any = SimpleNamespace(optimizer=self.sharded)
        self.sharded.load_state_dict(checkpoint.learner_state(learner))


class _Straight(torch.autograd.Function):
    """QaRL's delivery of a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, gradient: Tensor, gradients: Any) -> Tensor:
        ctx.master, ctx.gradient, ctx.gradients = master, gradient, gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        ctx.gradients.wait_for_memory(ctx.master)
        return ctx.gradients.start_reduction(ctx.master, ctx.gradient), None, None


class DTensors:
    """FSDP2's parts without its module hooks.

    Masters are DTensors divided by rows, torch's AdamW steps them, torch's checkpoints hold them.
    A gradient is a partial DTensor that is redistributed to rows, one ahead of the next.
    """

    def __init__(self, masters: Mapping[str, Tensor]):
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.masters: dict[str, Any] = {
            name: nn.Parameter(distribute_tensor(m, self.mesh, [Shard(0)], src_data_rank=None))
            for name, m in masters.items()
        }
        self.optimizer = torch.optim.AdamW(self.masters.values(), fused=True, **SETTINGS)

    def backward(self, gradients: Gradients, last: bool) -> None:
        """See `Engine`."""
        pending: list[tuple[str, DTensor]] = []
        for name, gradient in gradients:
            partial_sum = DTensor.from_local(gradient(), self.mesh, [Partial()], run_check=False)
            pending.append((name, partial_sum.redistribute(placements=[Shard(0)], async_op=True)))
            if len(pending) > 1:
                self._arrive(*pending.pop(0))
        for each in pending:
            self._arrive(*each)

    def _arrive(self, name: str, rows: DTensor) -> None:
        """Add a summed gradient to its master's."""
        master = self.masters[name]
        rows._local_tensor = rows.to_local() + 0  # waits
        master.grad = rows if master.grad is None else master.grad.add_(rows)

    def step(self) -> float:
        """See `Engine`."""
        norm = nn.utils.clip_grad_norm_(self.masters.values(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def full(self) -> dict[str, Tensor]:
        """See `Engine`."""
        return {name: p.detach().full_tensor() for name, p in self.masters.items()}

    def _state(self) -> dict[str, Any]:
        """Return masters and moments by name."""
        if not self.optimizer.state:
            for p in self.masters.values():
                p.grad = torch.zeros_like(p)
            rate = self.optimizer.param_groups[0]["lr"]
            self.optimizer.param_groups[0]["lr"] = 0.0
            self.optimizer.step()
            self.optimizer.param_groups[0]["lr"] = rate
            self.optimizer.zero_grad()
        moments = {name: dict(self.optimizer.state[p]) for name, p in self.masters.items()}
        return {"masters": {n: p.detach() for n, p in self.masters.items()}, "moments": moments}

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        state_dict_saver.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """See `Engine`."""
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder)


class FullyShard:
    """FSDP2 as it is meant: `fully_shard` on modules, whose forward gathers the masters."""

    def __init__(self, masters: Mapping[str, Tensor]):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.holders = _Holders(masters)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for holder in self.holders.each.values():
            fully_shard(holder, mesh=self.mesh, mp_policy=policy)
        fully_shard(self.holders, mesh=self.mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.holders.parameters(), fused=True, **SETTINGS)

    def backward(self, gradients: Gradients, last: bool) -> None:
        """See `Engine`. FSDP divides by processes, which is undone here."""
        world = dist.get_world_size()
        self.holders((name, _times(world, gradient)) for name, gradient in gradients).backward()

    def step(self) -> float:
        """See `Engine`."""
        norm: Any = nn.utils.clip_grad_norm_(self.holders.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor())

    def full(self) -> dict[str, Tensor]:
        """See `Engine`."""
        return {n: p.detach().full_tensor() for n, p in self.holders.names().items()}

    def _state(self) -> dict[str, Any]:
        """Return masters and optimizer state by name."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        masters, optimizer = get_state_dict(self.holders, self.optimizer)
        return {"masters": masters, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        state_dict_saver.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """See `Engine`."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder)
        set_state_dict(
            self.holders,
            self.optimizer,
            model_state_dict=state["masters"],
            optim_state_dict=state["optimizer"],
        )


class DeepSpeed:
    """`deepspeed.initialize` of a module that has the masters, ZeRO 1 to 3."""

    def __init__(self, masters: Mapping[str, Tensor], stage: int, updates_of: int = 2):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute otherwise
        self.stage = stage
        self.world = dist.get_world_size()
        self.holders = _Holders(masters)
        optimizer = torch.optim.AdamW(self.holders.parameters(), fused=True, **SETTINGS)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": updates_of,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=self.holders, optimizer=optimizer, config=config, dist_init_required=False
        )

    def backward(self, gradients: Gradients, last: bool) -> None:
        """See `Engine`. DeepSpeed divides by processes and micro-batches, which is undone here."""
        scale = self.world * self.engine.gradient_accumulation_steps()
        scaled = ((name, _times(scale, gradient)) for name, gradient in gradients)
        self.engine.backward(self.engine(scaled))
        if not last:
            self.engine.step()

    def step(self) -> float:
        """See `Engine`."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm() or 0.0)

    def full(self) -> dict[str, Tensor]:
        """See `Engine`."""
        import deepspeed

        result = {}
        for name, p in self.holders.names().items():
            with deepspeed.zero.GatheredParameters([p], enabled=self.stage == 3):
                result[name] = p.detach().clone()
        return result

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        self.engine.save_checkpoint(str(folder), tag="one")

    def load(self, folder: Path) -> None:
        """See `Engine`."""
        path, _ = self.engine.load_checkpoint(str(folder), tag="one")
        if path is None:
            raise RuntimeError("DeepSpeed found no checkpoint it can read")


def import_all() -> None:
    """Import what the engines import, so that forks have it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    import qarl.learner.optim.sharded
    import qarl.run.checkpoint  # noqa: F401


ENGINES: dict[str, Any] = {
    "qarl": Qarl,
    "dtensor": DTensors,
    "fully_shard": FullyShard,
    "deepspeed 1": partial(DeepSpeed, stage=1),
    "deepspeed 2": partial(DeepSpeed, stage=2),
    "deepspeed 3": partial(DeepSpeed, stage=3),
}
"""Name of each engine → its constructor from full masters, equal in every process."""
