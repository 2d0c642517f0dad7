"""One process of `tests/learner/test_sharded.py`, forked with torchrun's environment.

It computes with rows of masters, without a model, and writes the results to a file.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.sharded import ShardedOptimizer
from qarl.learner.processes import Processes, join_processes, leave_processes
from qarl.quant.checkpoint.families import ExpertLayout
from qarl.quant.layers.gradients import Gradients
from qarl.quant.materialize import materialize
from qarl.quant.materialize.experts import materialize_experts
from qarl.quant.runtime.shards import (
    cut_rows,
    mesh_of_all,
    shard_of,
    share,
    shared_like,
)
from qarl.quant.schemes import SCHEMES, Scheme, is_integer
from qarl.run.checkpoint import load_checkpoint, save_checkpoint
from tests.support.learners import whole_state
from tests.support.tensors import normal, same_bits

SHAPES = {
    "a": (6, 16),
    "experts.gate_up_proj": (3, 8, 32),
    "b": (7, 48),
    "norm": (32,),
}
"""Shapes of the masters in `row_steps`.

Rows are as long as the fused AdamW's vectors or a multiple, because its last elements beyond them
are rounded differently, wherever a process's part ends.
"""


def gradient_of(key: str, step: int) -> torch.Tensor:
    """Return the fp32 gradient of one of `SHAPES`, a function of the arguments only."""
    return normal(*SHAPES[key], seed=1000 * step + len(key))


ROWS = ("adamw", "muon", "muon bfloat16")
"""Name → optimizer and master dtype of `row_steps`."""


def row_steps(
    name: str, folder: Path, processes: Processes | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Take three steps over masters of `SHAPES` with gradients of `gradient_of`, of whole masters
    or of each process's rows. Between steps the optimizer's state goes through a checkpoint in
    `folder`. Return masters and the rest of the state, both whole.
    """
    kind, _, dtype = name.partition(" ")
    settings = {"name": kind, "lr": 1e-2, "rounding": "nearest", "grad_clip": 1e9}
    masters = {
        key: torch.nn.Parameter(gradient_of(key, 0).to(getattr(torch, dtype or "float32")))
        for key in SHAPES
    }
    if processes is not None:
        mesh = mesh_of_all(torch.device("cpu"))
        masters = {key: share(master, mesh) for key, master in masters.items()}

    def learner() -> ShardedOptimizer:
        model: Any = SimpleNamespace(
            masters=masters,
            matrices=lambda: set(SHAPES) - {"norm"},
            device=torch.device("cpu"),
            gradients=Gradients(),
        )
        config = LearnerConfig.model_validate({"optimizer": settings})
        return ShardedOptimizer(model, config, processes or Processes())

    stepping = learner()
    for step in range(1, 4):
        for key, master in masters.items():
            gradient = gradient_of(key, step)
            shard = shard_of(master)
            rows = (gradient if shard is None else shard.rows(gradient)).clone()
            master.grad = shared_like(rows, master)
        stepping.step()
        save_checkpoint(folder, step, {"learner": stepping.state_dict()}, 1, processes)
        stepping = learner()
        reading: Any = SimpleNamespace(optimizer=stepping)
        stepping.load_state_dict(load_checkpoint(folder, processes).learner_state(reading))
    state = whole_state(stepping.state_dict())
    return state.pop("masters"), state


def equal_matrices(scheme: Scheme, blocks: int, processes: Processes) -> bool:
    """Return whether a matrix of this many blocks of rows, materialized by rows, equals the one
    materialized as a whole: into new buffers, over the first version, and with kept scales if the
    scheme has any.
    """
    height = scheme.block[0] if scheme.block else 1
    shape = torch.Size((blocks * height, 256))
    first, second, partner = (normal(*shape, seed=seed) for seed in range(3))
    shard = cut_rows(shape, processes.rank, processes.world)
    fused = (partner,) if scheme.fuses_scales else ()
    rows = tuple(shard.rows(other) for other in fused)
    ours = theirs = kept = None
    equal = []
    for weight in (first, second):
        theirs = materialize(weight, scheme, torch.bfloat16, "weight", fused, theirs, kept)
        ours = materialize(
            shard.rows(weight),
            scheme,
            torch.bfloat16,
            "weight",
            rows,
            ours,
            kept,
            shard,
        )
        equal.append(same_bits(ours.tensors(), theirs.tensors()))
        if scheme.weights is not None and is_integer(scheme.weights):
            assert theirs.scale is not None
            kept = theirs.scale.clone()
    return all(equal)


def equal_experts(scheme: Scheme, processes: Processes) -> bool:
    """Return whether three experts, materialized by the processes that hold them, equal those of
    the whole stacks.
    """
    height = scheme.block[0] if scheme.block else 1
    stacks = [normal(3, count * height, 256, seed=count) for count in (2, 1)]
    shards = [cut_rows(stack.shape, processes.rank, processes.world) for stack in stacks]
    gate_up, down = (shard.rows(stack) for shard, stack in zip(shards, stacks, strict=True))
    theirs = materialize_experts(stacks[0], stacks[1], scheme, torch.bfloat16, "experts")
    ours = materialize_experts(gate_up, down, scheme, torch.bfloat16, "experts", shards=shards)
    ours = materialize_experts(
        gate_up, down, scheme, torch.bfloat16, "experts", ours, shards=shards
    )
    return same_bits(ours.tensors(ExpertLayout()), theirs.tensors(ExpertLayout()))


def reduced(processes: Processes) -> list[torch.Tensor]:
    """Return this process's rows of a sum of gradients, sent in fp32 and in bfloat16."""
    sums = []
    for dtype in (torch.float32, torch.bfloat16):
        mine = normal(5, 24, seed=processes.rank)
        shard = cut_rows(mine.shape, processes.rank, processes.world)
        sums.append(shard.reduce(mine, dtype)().clone())
    even = normal(6, 24, seed=processes.rank)
    shard = cut_rows(even.shape, processes.rank, processes.world)
    # what GPUs do
    assert torch.equal(
        shard.reduce(even.clone(), scatters=True)(),
        shard.reduce(even)(),
    )
    return sums


def main(file: Path) -> None:
    processes = join_processes()
    torch.set_num_threads(1)
    made: dict[str, Any] = {}
    for name in ROWS:
        made[name] = row_steps(name, file.with_name(name), processes)
    equal = {}
    for name, scheme in SCHEMES.items():
        equal |= {
            f"{name}, {blocks} blocks": equal_matrices(scheme, blocks, processes)
            for blocks in (1, 3)
        }
        equal[f"{name}, experts"] = equal_experts(scheme, processes)
    told = processes.all_gather(equal)
    sums = processes.all_gather(reduced(processes))
    if processes.first:
        made["sums"] = sums
        made["equal"] = {key: all(one[key] for one in told) for key in equal}
        torch.save(made, file)
    leave_processes()
