"""One process of `tests/learner/test_two_processes.py` and `test_four_processes.py`, forked with
torchrun's environment.

A job trains a random policy on `batch_of()` and writes its whole state; see
`run`.
"""

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.communication import Sent
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.lora import LoraConfig
from qarl.learner.learner import Learner
from qarl.learner.optim.sharded import masters_mesh
from qarl.learner.processes import Processes, join_processes, leave_processes
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.add_lora import add_adapters
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import own_rows, row_a_process
from qarl.quant.schemes import MASTER_DTYPES, get_scheme
from qarl.run.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from qarl.run.policy import free_uncached
from tests.support.learners import batch_numbers, batch_of, whole_state


def run(job: dict[str, Any], processes: Processes) -> None:
    """Run a job with the fields folder (of the model), scheme, dtype, learner (its configuration),
    batches [first, last), resume (a folder of checkpoints, or None), and save: where results are
    written, and a checkpoint in a folder of that name without .pt.
    """
    config = LearnerConfig.model_validate(job["learner"])
    dtype: torch.dtype = getattr(torch, job["dtype"])

    def initial_model() -> LowBitModel:
        scheme = get_scheme(job["scheme"])
        context = LayerContext(dtype, "reference", config.aligned)
        mesh = masters_mesh(config, processes)
        masters = load_masters(Path(job["folder"]), MASTER_DTYPES[config.master_dtype], mesh=mesh)
        return LowBitModel(masters, scheme, context)

    model = initial_model()
    if isinstance(config.lora, LoraConfig):
        add_adapters(model, config.lora, seed=0)
    free_uncached(model, config)
    reference = initial_model() if config.kl.name != "none" else None
    learner = Learner(model, config, reference, processes)
    if job["resume"]:
        checkpoint = load_checkpoint(Path(job["resume"]), processes)
        learner.load_state_dict(checkpoint.learner_state(learner))
    backward = torch.Tensor.backward
    sums = []

    def backwards(loss: torch.Tensor, **options: bool) -> None:
        with Sent(processes.world) as of_one:
            backward(loss, **options)
        sums.append((dict(of_one.calls), of_one.bytes))

    with (
        Sent(processes.world) as sent,
        mock.patch.object(torch.Tensor, "backward", backwards),
    ):
        stats = [learner.learn(batch_of(), step=step) for step in range(*job["batches"])]
    folder = Path(job["save"]).with_suffix("")
    save_checkpoint(folder, 1, {"learner": learner.state_dict()}, 1, processes)
    state = whole_state(learner.state_dict())
    codes = {item.name: item.tensor.clone() for item in model.low_bit_tensors()}
    tied = model.linears["lm_head"].codes().codes if "lm_head" in model.linears else torch.empty(0)
    if processes.first:
        numbers = [batch_numbers(each) for each in stats]
        held = sum(own_rows(p.detach()).numel() for p in model.masters.values())
        whole = sum(p.numel() for p in model.masters.values())
        gradients = 4 * (whole + tied.numel()) * len(sums)
        version = tied.nbytes + sum(tensor.nbytes for tensor in codes.values())
        expected = (
            (gradients + version * sum(s.updates for s in stats))
            * (processes.world - 1)
            / processes.world
        )
        made = {
            "state": state,
            "codes": codes,
            "numbers": numbers,
            "held": held / whole,
        }
        made["sums"] = sums
        torch.save({**made, "sent_bytes": sent.bytes, "expected_bytes": expected}, job["save"])


def read(job: dict[str, Any], processes: Processes) -> None:
    """Write a checkpoint in the folder `read`, and read it together, the first process ahead of the
    other. Save what each reports.

    If `state` is "damaged", the second process's file has a flipped bit; if it is "followed", a
    later checkpoint with an empty manifest exists. step_over: whether to continue from an older
    checkpoint.
    """
    folder = Path(job["read"])
    rows = row_a_process(torch.arange(8.0))
    target = save_checkpoint(folder, 7, {"learner": {"masters": {"a": rows}}}, 2, processes)
    if processes.first and job["state"] == "damaged":
        file = target / "shard-00002-model-00001-of-00001.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if job["state"] == "followed":
        later = save_checkpoint(folder, 8, {}, 2, processes)
        if processes.first:
            (later / "manifest.json").write_text("")
    processes.barrier()
    if not processes.first:
        time.sleep(0.5)  # so that it comes when what the first one sets aside is gone
    try:
        report = (lambda _: None) if job["step_over"] else None
        said = f"step {load_checkpoint(folder, processes, report).step}"
    except CheckpointError as error:
        said = str(error)
    told = processes.all_gather(said)
    if processes.first:
        torch.save({"said": told}, job["save"])


def main(jobs: Path) -> None:
    processes = join_processes()
    torch.set_num_threads(1)
    for job in json.loads(jobs.read_text()):
        (read if "read" in job else run)(job, processes)
    leave_processes()
