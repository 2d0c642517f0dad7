"""The optimizer of the masters.

It is AdamW, or Muon for the matrices of linear layers and AdamW for the rest. Masters are stepped
one after another (`learner.optim.parameter_optimizer`), each by a torch optimizer of its own.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim.loss_scale import PrecisionError, short_name
from qarl.learner.optim.muon import MOMENTUM, orthogonalize
from qarl.learner.optim.parameter_optimizer import Index, ParameterOptimizer, UpdateCounts
from qarl.learner.processes import FailedElsewhereError, Processes
from qarl.quant.runtime.shards import own_rows, row_a_process, shard_of, shared_like


@dataclass(frozen=True)
class UpdateDiagnostics:
    """Effect of an update on the masters."""

    lost: float
    """Fraction of the weights with a momentum whose stored value did not change."""
    crossed: int
    """Number of weights that round to another bfloat16 than before."""
    weights: int
    """Number of all weights."""


@dataclass(frozen=True)
class Step:
    """Result of `MasterOptimizer.clipped_step`."""

    norm: float
    """Global L2 norm of the mini-batch's gradient before clipping."""
    taken: bool
    """Whether the step was taken. It is not if the norm is infinite or NaN; all masters are then
    unchanged.
    """
    diagnostics: UpdateDiagnostics | None = None
    """Effect of the update on the masters; None if it was not counted."""


class MasterOptimizer:
    """One optimizer over all masters, fp32, bf16 or fp16.

    Its state is that of the torch optimizers inside, and the generator of stochastic rounding. Of a
    shared master (`quant.runtime.shards`) every process steps its own rows; `processes` are
    those that share the masters, and they call every method together. Gradients of 16-bit masters
    are accumulated in fp32 once it is created.

    Args:
        masters: name → parameter.
        matrices: names of the weights that Muon may take, [O, I] or stacked experts.

    Raises:
        ConfigError: offload would move nothing, because the masters are on the CPU.
    """

    def __init__(
        self,
        masters: dict[str, nn.Parameter],
        matrices: set[str],
        config: OptimizerConfig,
        processes: Processes | None = None,
    ):
        self._config = config
        self.lr = config.lr
        """Learning rate of the steps to come."""
        self._masters = masters
        self._sharded = any(shard_of(master) is not None for master in masters.values())
        # Every process steps whole masters, and must round them alike: with the same generator. Its
        # counts are then those of all processes, so they are not summed.
        self._processes = (processes if self._sharded else None) or Processes()
        self._device = next(iter(masters.values())).device
        self._offload = _offload_device(config, self._device)
        self._generator = torch.Generator(self._device).manual_seed(self._processes.rank)
        self._by_master: dict[str, ParameterOptimizer] = {}
        self._by_muon = set(muon_masters(masters, matrices, config))
        for name, master in masters.items():
            if master.dtype != torch.float32:
                master.grad_dtype = torch.float32
            own_shape = own_rows(master.detach()).shape
            alternating = f"{name}_bias" in masters
            indices = (
                list(matrices_of(name, own_shape, alternating)) if name in self._by_muon else []
            )
            rounding = config.rounding_of(short_name(master.dtype))
            cut = shard_of(master) if indices and master.ndim == 2 else None
            self._by_master[name] = ParameterOptimizer(
                master, indices, config, rounding, self._generator, self._offload, cut
            )

    def gradient_norm(self) -> float:
        """Return the global L2 norm of all gradients, computed in fp32.

        It is infinite or NaN if any gradient is.
        """
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        # torch takes no list of both kinds. It sums each shared one over the processes.
        shared = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        unshared = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norms = [get_total_norm(kind) for kind in (shared, unshared) if kind]
        return math.hypot(*(float(n.full_tensor() if isinstance(n, DTensor) else n) for n in norms))

    def clipped_step(self, diagnose: bool = False) -> Step:
        """Clip to `grad_clip` and step, if gradients are finite.

        Clipping is that of torch's `clip_grad_norm_`, bit for bit.
        """
        norm = self.gradient_norm()
        taken = math.isfinite(norm)
        if not taken:
            return Step(norm, taken)
        clip_grads_with_norm_(self._masters.values(), self._config.grad_clip, torch.tensor(norm))
        return Step(norm, taken, self.step(diagnose))

    def step(self, diagnose: bool = False) -> UpdateDiagnostics | None:
        """Step every master at the learning rate `lr`.

        Returns the effect of the update if `diagnose`. Raises `PrecisionError` if the step took a
        16-bit master out of its dtype's range.
        """
        cut = [
            optimizer
            for name, optimizer in self._by_master.items()
            if optimizer.cut and self._masters[name].grad is not None
        ]
        counts: list[UpdateCounts | None] = []
        # As many cut matrices at a time as there are processes, because each orthogonalizes one.
        for start in range(0, len(cut), self._processes.world):
            batch = cut[start : start + self._processes.world]
            orthogonalize(
                [optimizer.row_muon for optimizer in batch],
                [optimizer.update() for optimizer in batch],
            )
            counts += [optimizer.step(self.lr, diagnose) for optimizer in batch]
        counts += [
            optimizer.step(self.lr, diagnose)
            for optimizer in self._by_master.values()
            if not optimizer.cut
        ]
        self._require_range()
        return self._diagnostics(counts) if diagnose else None

    def _diagnostics(self, by_master: Iterable[UpdateCounts | None]) -> UpdateDiagnostics:
        """Return the effect of an update, over all processes.

        by_master: counts of each master of this process; None if it has no gradient.
        """
        sums = torch.zeros(4, dtype=torch.int64, device=self._device)
        for counts in by_master:
            if counts is not None:
                sums[:3] += torch.stack([counts.meant, counts.lost, counts.crossed])
        sums[3] = sum(own_rows(master.detach()).numel() for master in self._masters.values())
        meant, lost, crossed, weights = self._processes.all_reduce(sums).tolist()
        return UpdateDiagnostics(lost / max(meant, 1), crossed, weights)

    def _require_range(self) -> None:
        """Raise `PrecisionError` if a master is not finite, naming the first one.

        Waits for the device once.
        """
        checks = {name: optimizer.in_range() for name, optimizer in self._by_master.items()}
        finite = {name: check for name, check in checks.items() if check is not None}
        if not finite:
            return
        outside = torch.stack(list(finite.values())).logical_not().sum()
        if not self._processes.all_reduce(outside):
            return
        name = next((name for name, check in finite.items() if not check), None)
        if name is None:
            raise FailedElsewhereError(
                "a master left its range in another process, which says which"
            )
        dtype = self._masters[name].dtype
        raise PrecisionError(
            f"master {name!r} left the range of {short_name(dtype)} (±{torch.finfo(dtype).max:.5g})"
            " by this step; nothing of it is published: resume from a checkpoint with a lower"
            " learner.optimizer.lr, or start a run with --master-dtype float32 or bfloat16"
        )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self._masters.values():
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs: `moments` by master, and `generators`.

        Of shared masters both are shared: the moments as the master is, and of the generators'
        states, uint8 [processes, bytes], each process has its own.
        """
        moments = {}
        for name, optimizer in self._by_master.items():
            values = optimizer.moments()
            if name in self._by_muon:
                # A process without a matrix of a stack has AdamW's state of nothing.
                values = {key: value for key, value in values.items() if key == MOMENTUM}
            moments[name] = {
                key: shared_like(value, self._masters[name]) if value.ndim else value
                for key, value in values.items()
            }
        state = self._generator.get_state()
        return {
            "moments": moments,
            "generators": row_a_process(state) if self._sharded else state[None],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of the same masters, whose tensors are used from now on.

        Raises `ConfigError` if it belongs to other masters.
        """
        require_same_masters(state["moments"], self._masters)
        for name, optimizer in self._by_master.items():
            values = {key: own_rows(value) for key, value in state["moments"][name].items()}
            has_rows = own_rows(self._masters[name].detach()).numel() > 0
            optimizer.load_moments(values if has_rows or name not in self._by_muon else {})
        generators = own_rows(state["generators"])
        own = generators[self._processes.rank % len(generators)]
        self._generator.set_state(own.cpu().clone())

    def empty_state(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Return tensors without values for a `state_dict` of these shapes.

        They are on the device of moments between steps. Raises `ConfigError` if the shapes are of
        other masters.
        """
        require_same_masters(shapes["moments"], self._masters)
        device = self._offload or self._device
        moments = {}
        for name, master in self._masters.items():
            rows = torch.empty(own_rows(master.detach()).shape, device="meta")
            moments[name] = {
                key: shared_like(torch.empty_like(rows, device=device), master)
                if shape
                else torch.empty(())
                for key, shape in shapes["moments"][name].items()
            }
        return {
            "moments": moments,
            "generators": torch.empty(shapes["generators"], dtype=torch.uint8),
        }


def require_same_masters(saved: Collection[str], masters: Collection[str]) -> None:
    """Raise `ConfigError` if the names of a checkpoint's masters are not these."""
    differing = sorted(set(saved) ^ set(masters))
    if differing:
        raise ConfigError(
            f"the checkpoint's optimizer state is of other masters: {len(differing)} differ, the"
            f" first being {differing[0]!r}; resume with the version and options that wrote it"
        )


def _offload_device(config: OptimizerConfig, device: torch.device) -> torch.device | None:
    """Return the device of the moments between steps. None: that of the masters.

    Raises `ConfigError` if the masters are on the CPU already.
    """
    if config.offload == "none":
        return None
    if device.type == "cpu":
        raise ConfigError(
            "learner.optimizer.offload 'cpu' moves the optimizer's state off a GPU, and the masters"
            " are on the CPU already; leave it 'none' on this machine"
        )
    return torch.device("cpu")


def muon_masters(
    masters: Mapping[str, nn.Parameter],
    matrices: Collection[str],
    config: OptimizerConfig,
) -> list[str]:
    """Return the names of the masters that Muon takes, in order.

    matrices: names of the weights that it may take. AdamW takes the vectors among them.
    """
    by_muon = config.name == "muon"
    return [
        name for name, master in masters.items() if by_muon and name in matrices and master.ndim > 1
    ]


def matrices_of(name: str, shape: torch.Size, alternating: bool = False) -> Iterator[Index]:
    """Yield the index of each matrix in a master of that shape.

    A 2-D master is one matrix. Stacked experts have one matrix for each expert; gate and up count
    as two.

    alternating: whether the experts are gpt-oss's, whose columns of gate and up alternate.
    """
    if len(shape) == 2:
        yield (slice(None),)
        return
    if alternating and name.endswith("gate_up_proj"):
        yield from (
            (expert, slice(None), slice(first, None, 2))
            for expert in range(shape[0])
            for first in range(2)
        )
        return
    rows = shape[1] // 2 if name.endswith("gate_up_proj") else shape[1]
    for expert in range(shape[0]):
        for start in range(0, shape[1], rows):
            yield (expert, slice(start, start + rows))
