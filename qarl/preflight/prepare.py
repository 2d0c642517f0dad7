"""The checks that need torch, in their order, and what the run takes from them."""

import torch

from qarl.configs.schema.run import RunConfig
from qarl.learner.gradients import require_compiler
from qarl.learner.objectives import find_objective
from qarl.learner.processes import Processes
from qarl.preflight.disk import check_disk
from qarl.preflight.files import check_processes
from qarl.preflight.prompts import check_prompts
from qarl.preflight.support import require_schemes, require_servers_of_ranks
from qarl.quant.checkpoint.settings import describe_towers
from qarl.quant.runtime.libraries import untested_libraries
from qarl.report.startup import phase, say
from qarl.run.policy import RunInputs, open_inputs
from qarl.tasks import Task


def prepare(
    config: RunConfig, task: Task, processes: Processes | None = None, saves: bool = False
) -> RunInputs:
    """Check what needs torch in the first process, and return what the run reads in each.

    This runs before a run folder is made. It raises the error of the part that is wrong
    (`SchemeError`, `TaskError`, `ModelError`, `ConfigError`) in all processes.

    Args:
        config: The run's configuration.
        task: The configuration's task, as `qarl.preflight.files.check_files` returns it.
        processes: All processes, which call this together. Default: this one alone.
        saves: Whether the run writes checkpoints, for which the disk needs room.
    """
    processes = processes or Processes()
    inputs: RunInputs | None = None

    def check() -> None:
        nonlocal inputs
        inputs = check_inputs(config, task, processes.world, saves)

    processes.run_on_first(check)
    return inputs or open_inputs(config, task)


def check_inputs(
    config: RunConfig, task: Task, processes: int = 1, saves: bool = False
) -> RunInputs:
    """Check what needs torch in this process, and return what the run reads.

    processes: number of processes of the run. The rest is as in `prepare`.
    """
    check_processes(config, processes)
    if config.learner.compile is True:
        require_compiler("cuda" if torch.cuda.is_available() else "cpu")
    find_objective(config.learner.objective)
    require_servers_of_ranks(config)
    with phase("checking kernels"):
        architecture = require_schemes(config)
    with phase("checking tokenizer and prompts"):
        inputs = check_prompts(config, task, architecture)
    if saves:
        check_disk(config, inputs.folder)
    towers = describe_towers(inputs.folder, config.rollout.pictures)
    for line in filter(None, (inputs.task.describe(), towers, *untested_libraries())):
        say(line)
    return inputs
