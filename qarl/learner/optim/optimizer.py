"""Optimizers over the masters: AdamW, or Muon for the matrices of linear layers and AdamW for the
rest.

Masters are stepped one after another (`learner.optim.master_step`), each by a torch optimizer of
its own.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim.loss_scale import PrecisionError, short_name
from qarl.learner.optim.master_step import Index, MasterStep, UpdateCounts
from qarl.learner.optim.muon import orthogonalize
from qarl.learner.processes import FailedElsewhereError, Processes
from qarl.quant.runtime.shards import shard_of


@dataclass(frozen=True)
class UpdateDiagnostics:
    """What became of an update in the masters. lost: of the weights with a momentum, the share
    whose stored value is what it was. crossed: of all `weights`, those that round to another
    bfloat16 than before.
    """

    lost: float
    crossed: int
    weights: int


@dataclass(frozen=True)
class Step:
    """norm: global L2 norm of the mini-batch's gradient before clipping. taken: False where the
    norm is infinite or NaN; every master is then what it was. arrived: what a diagnosed
    `MasterOptimizer.step` returned, else None.
    """

    norm: float
    taken: bool
    arrived: UpdateDiagnostics | None = None


class MasterOptimizer:
    """One optimizer step over all masters, fp32, bf16 or fp16. State is that of the torch
    optimizers inside and the generator of stochastic rounding. lr: learning rate of the steps to
    come.

    Of masters with a shard (`quant.runtime.shards`) every process steps its rows; `processes` are
    those that have them, and call every method together.
    """

    def __init__(
        self,
        masters: dict[str, nn.Parameter],
        matrices: set[str],
        config: OptimizerConfig,
        processes: Processes | None = None,
    ):
        """masters: name → parameter; gradients of 16-bit ones are accumulated in fp32 from here on.
        matrices: names of the weights that Muon may take, [O, I] or stacked experts. Raises
        `ConfigError` where offload moves nothing.
        """
        self._config = config
        self.lr = config.lr
        self._masters = masters
        self._sharded = any(shard_of(master) is not None for master in masters.values())
        # Whole masters are stepped alike in every process, which has to round them alike and counts
        # for all.
        self._processes = (processes if self._sharded else None) or Processes()
        self._device = next(iter(masters.values())).device
        home = _home(config, self._device)
        self._generator = torch.Generator(self._device).manual_seed(self._processes.rank)
        self._steps: dict[str, MasterStep] = {}
        by_muon = muon_masters(masters, matrices, config)
        for name, master in masters.items():
            if master.dtype != torch.float32:
                master.grad_dtype = torch.float32
            indices = list(matrices_of(name, master.shape)) if name in by_muon else []
            rounding = config.rounding_of(short_name(master.dtype))
            cut = shard_of(master) if indices and master.ndim == 2 else None
            self._steps[name] = MasterStep(
                master, indices, config, rounding, self._generator, home, cut
            )

    def gradient_norm(self) -> float:
        """Global L2 norm of all gradients, computed in fp32; infinite or NaN where any is."""
        taught = [p for p in self._masters.values() if p.grad is not None]
        whole = _total_norm(p.grad for p in taught if shard_of(p) is None)
        if not self._sharded:
            return whole
        here = _total_norm(p.grad for p in taught if shard_of(p) is not None)
        squares = self._processes.total(
            torch.tensor(here**2, dtype=torch.float64, device=self._device)
        )
        return math.sqrt(whole**2 + float(squares))

    def clipped_step(self, diagnose: bool = False) -> Step:
        """Clip to `grad_clip`, bit for bit as torch's `clip_grad_norm_`, and step, where gradients
        are finite.
        """
        norm = self.gradient_norm()
        taken = math.isfinite(norm)
        if not taken:
            return Step(norm, taken)
        clip_grads_with_norm_(self._masters.values(), self._config.grad_clip, torch.tensor(norm))
        return Step(norm, taken, self.step(diagnose))

    def step(self, diagnose: bool = False) -> UpdateDiagnostics | None:
        """Step every master at the learning rate `lr`.

        Returns what became of the update if `diagnose`. Raises `PrecisionError` where the step took
        a 16-bit master out of its dtype's range.
        """
        cut = [
            step
            for name, step in self._steps.items()
            if step.cut and self._masters[name].grad is not None
        ]
        done: list[UpdateCounts | None] = []
        for start in range(0, len(cut), self._processes.world):
            turn = cut[start : start + self._processes.world]
            orthogonalize([step.row_muon for step in turn], [step.update() for step in turn])
            done += [step.step(self.lr, diagnose) for step in turn]
        done += [step.step(self.lr, diagnose) for step in self._steps.values() if not step.cut]
        self._require_range()
        return self._arrived(done) if diagnose else None

    def _arrived(self, done: Iterable[UpdateCounts | None]) -> UpdateDiagnostics:
        """Of all processes; of a master without a gradient there are no counts."""
        counted = torch.zeros(4, dtype=torch.int64, device=self._device)
        for counts in done:
            if counts is not None:
                counted[:3] += torch.stack([counts.meant, counts.lost, counts.crossed])
        counted[3] = sum(master.numel() for master in self._masters.values())
        meant, lost, crossed, weights = self._processes.total(counted).tolist()
        return UpdateDiagnostics(lost / max(meant, 1), crossed, weights)

    def _require_range(self) -> None:
        """Raise `PrecisionError` naming the first master that is not finite; the device is waited
        for once.
        """
        within = {
            name: finite
            for name, step in self._steps.items()
            if (finite := step.in_range()) is not None
        }
        if not within:
            return
        outside = torch.stack(list(within.values())).logical_not().sum()
        if not self._processes.total(outside):
            return
        name = next((name for name, finite in within.items() if not finite), None)
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
        """Everything a resumed run needs."""
        steps = {name: step.state_dict() for name, step in self._steps.items()}
        return {"masters": steps, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict` of the same masters."""
        for name, step in self._steps.items():
            step.load_state_dict(state["masters"][name])
        generators = state["generator"]
        several = generators if generators.ndim == 2 else generators[None]
        self._generator.set_state(several[self._processes.rank % len(several)].cpu().clone())


def _total_norm(gradients: Iterable[torch.Tensor | None]) -> float:
    fp32 = [gradient.float() for gradient in gradients if gradient is not None]
    return float(torch.nn.utils.get_total_norm(fp32)) if fp32 else 0.0


def require_same_masters(state: dict[str, Any], masters: Collection[str]) -> None:
    """Raise `ConfigError` where an optimizer's `state_dict` is of other masters."""
    other = sorted(state.get("masters", {}).keys() ^ set(masters))
    if other:
        raise ConfigError(
            f"the checkpoint's optimizer state is of other masters: {len(other)} differ, the first"
            f" being {other[0]!r}; resume with the version and options that wrote it"
        )


def _home(config: OptimizerConfig, device: torch.device) -> torch.device | None:
    """Where moments lie between steps; None: with the masters."""
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
    """Names of the masters that Muon takes, in order. matrices: of weights it may take; vectors in
    them are AdamW's.
    """
    by_muon = config.name == "muon"
    return [
        name for name, master in masters.items() if by_muon and name in matrices and master.ndim > 1
    ]


def matrices_of(name: str, shape: torch.Size) -> Iterator[Index]:
    """Where the matrices of a master of that shape are: the whole of it, or each expert's; gate and
    up count as two.
    """
    if len(shape) == 2:
        yield (slice(None),)
        return
    rows = shape[1] // 2 if name.endswith("gate_up_proj") else shape[1]
    for expert in range(shape[0]):
        yield from ((expert, slice(start, start + rows)) for start in range(0, shape[1], rows))
