"""One process of `tests/test_zero.py`: python zero_worker.py JOB.json, started by torch.distributed.run.

A job trains a random policy on the batch of `test_learner` for some batches under one ZeRO stage after another and writes the
masters and the whole state of each; see `run`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from test_learner import batch_of

from learner.backends.partition import partitioned_loading
from learner.learner import Learner
from learner.processes import Processes, join_processes, leave_processes
from qarl.checkpoint import merge_states
from qarl.config import LearnerConfig
from qarl.config_lora import LoraConfig
from quant.kernels import make_factory
from quant.load import load_masters
from quant.lora import add_adapters
from quant.model import LowBitModel
from quant.schemes import MASTER_DTYPES, get_scheme


def run(job: dict[str, Any], processes: Processes) -> None:
    """job: folder (of the model), scheme, dtype, learner (configuration), batches [first, last), resume (state file or None),
    save (state file)."""
    config = LearnerConfig.model_validate(job["learner"])
    dtype: torch.dtype = getattr(torch, job["dtype"])
    reading = partitioned_loading(config)
    masters = load_masters(Path(job["folder"]), MASTER_DTYPES[config.master_dtype], reading=reading)
    model = LowBitModel(masters, get_scheme(job["scheme"]), dtype, make_factory("reference", dtype), config.aligned)
    if isinstance(config.lora, LoraConfig):
        add_adapters(model, config.lora, seed=0)
    learner = Learner(model, config, processes=processes)
    if job["resume"]:
        learner.load_state_dict(torch.load(job["resume"]))
    stats = [learner.learn(batch_of(), seed=step) for step in range(*job["batches"])]
    state = merge_states(processes.gathered(learner.state_dict()))
    if processes.first:
        codes = {item.name: item.tensor.clone() for item in model.low_bit_tensors()}
        numbers = [[s.loss, s.grad_norm, s.clipped, s.entropy, s.updates, s.skipped] for s in stats]
        torch.save({"state": state, "codes": codes, "numbers": numbers}, job["save"])


def main() -> None:
    processes = join_processes()
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(job, processes)
    leave_processes()


if __name__ == "__main__":
    main()
