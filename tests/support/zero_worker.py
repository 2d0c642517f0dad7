"""One process of `tests/learner/test_zero.py`, forked in the environment that torchrun gives: zero JOB.json.

A job trains a random policy on `batch_of()` under one ZeRO stage and writes its whole state; see `run`."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.communication import Sent
from qarl.configs.schema.learner import LearnerConfig, OptimizerConfig
from qarl.configs.schema.lora import LoraConfig
from qarl.learner.backends.native import shard_masters
from qarl.learner.backends.partitioned_muon import PartitionedMuon, Piece
from qarl.learner.backends.zero_loading import partitioned_loading
from qarl.learner.learner import Learner
from qarl.learner.processes import Processes, join_processes, leave_processes
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.add_lora import add_adapters
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import whole_shape
from qarl.quant.schemes import MASTER_DTYPES, get_scheme
from qarl.run.checkpoint import CheckpointError, load_checkpoint, merge_states
from tests.support.learners import batch_of


def run(job: dict[str, Any], processes: Processes) -> None:
    """job: folder (of the model), scheme, dtype, learner (configuration), batches [first, last), resume (state file or
    None), save (state file)."""
    config = LearnerConfig.model_validate(job["learner"])
    dtype: torch.dtype = getattr(torch, job["dtype"])

    def initial_model() -> LowBitModel:
        reading = partitioned_loading(config)
        masters = load_masters(Path(job["folder"]), MASTER_DTYPES[config.master_dtype], reading=reading)
        scheme, context = get_scheme(job["scheme"]), LayerContext(dtype, "reference", config.aligned)
        shard_masters(masters, config, processes, [scheme])
        return LowBitModel(masters, scheme, context)

    model = initial_model()
    if isinstance(config.lora, LoraConfig):
        add_adapters(model, config.lora, seed=0)
    if not config.keep_codes:
        model.release_codes()
    reference = initial_model() if config.kl.name != "none" else None
    learner = Learner(model, config, reference, processes)
    if job["resume"]:
        learner.load_state_dict(torch.load(job["resume"]))
    backward, sums = learner.backend.backward, []

    def backwards(loss: torch.Tensor) -> None:
        with Sent(processes.world) as of_one:
            backward(loss)
        sums.append((dict(of_one.calls), of_one.bytes))

    with Sent(processes.world) as sent, mock.patch.object(learner.backend, "backward", backwards):
        stats = [learner.learn(batch_of(), step=step) for step in range(*job["batches"])]
    state = merge_states(processes.gathered(learner.state_dict()))
    codes = {item.name: item.tensor.clone() for item in model.low_bit_tensors()}
    tied = model.linears["lm_head"].codes().codes if "lm_head" in model.linears else torch.empty(0)
    if processes.first:
        numbers = [[s.loss, s.grad_norm, s.clipped, s.entropy, s.updates, s.skipped, s.kl] for s in stats]
        held, whole = (sum(f(p).numel() for p in model.masters.values()) for f in (torch.detach, whole_shape))
        gradients = 4 * (whole + tied.numel()) * len(sums)
        version = tied.nbytes + sum(tensor.nbytes for tensor in codes.values())
        expected = (gradients + version * sum(s.updates for s in stats)) * (processes.world - 1) / processes.world
        made = {"state": state, "codes": codes, "numbers": numbers, "held": held / whole}
        made["sums"] = sums
        torch.save({**made, "sent_bytes": sent.bytes, "expected_bytes": expected}, job["save"])


SHAPES = {"a": (6, 10), "experts.gate_up_proj": (3, 8, 4), "b": (7, 3)}
"""Of Muon's masters in `step_pieces`: matrices wider and taller than they are long, and two an expert."""


def gradient_of(name: str, step: int) -> torch.Tensor:
    """fp32, of one of `SHAPES`, a function of its arguments."""
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def step_pieces(job: dict[str, Any], processes: Processes) -> None:
    """`PartitionedMuon` alone: masters laid end to end and cut at `cut`, the first process having what is before, the
    second what is after; three steps with gradients of `gradient_of`. Saves the masters at last."""
    config = OptimizerConfig.model_validate(job["optimizer"])
    cut = (0, job["cut"], sum(math.prod(shape) for shape in SHAPES.values()))
    first, last = cut[processes.rank], cut[processes.rank + 1]
    masters = {name: torch.nn.Parameter(gradient_of(name, 0)) for name in SHAPES}
    flat = torch.nn.Parameter(torch.cat([m.detach().flatten() for m in masters.values()])[first:last].clone())
    pieces, begin = {}, 0
    for name, master in masters.items():
        start, stop = (min(max(edge - begin, 0), master.numel()) for edge in (first, last))
        pieces[name] = (flat, Piece(start, stop, at=max(0, begin - first)))
        begin += master.numel()
    optimizer = PartitionedMuon(masters, [], config, processes)
    optimizer.place(pieces)
    optimizer.param_groups[0]["params"] = [flat]
    for step in range(1, 4):
        flat.grad = torch.cat([gradient_of(name, step).flatten() for name in SHAPES])[first:last].clone()
        optimizer.step()
    whole = torch.cat(processes.gathered(flat.detach()))
    if processes.first:
        parts = whole.split([m.numel() for m in masters.values()])
        found = {name: part.view(SHAPES[name]) for name, part in zip(SHAPES, parts, strict=True)}
        torch.save({"masters": found}, job["save"])


def read(job: dict[str, Any], processes: Processes) -> None:
    """Read the checkpoint in the folder `read` together, the first process ahead of the other, and save what each said
    of it. step_over: whether to go on from an older one."""
    if not processes.first:
        time.sleep(0.5)  # so that it comes when what the first one sets aside is gone
    try:
        step_over = (lambda _: None) if job["step_over"] else None
        said = f"step {load_checkpoint(Path(job['read']), processes, step_over)[0]}"
    except CheckpointError as error:
        said = str(error)
    told = processes.gathered(said)
    if processes.first:
        torch.save({"said": told}, job["save"])


def main() -> None:
    processes = join_processes()
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        (step_pieces if "cut" in job else read if "read" in job else run)(job, processes)
    leave_processes()
