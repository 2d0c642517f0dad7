"""Checks of a run before it begins: what can be refused is looked at once, the cheapest first.

- `memory`: the plan of a run's memory.
- `schemes`: whether the schemes fit the model's shapes.
- `files`: new folders, names, the model's files, the task and its reward.
- `support`: kernels for the schemes, the model's architecture, layer rules, adapters.
- `prompts`: tokenizer, chat template, one prompt of each split.
- `disk`: room for a checkpoint.
- `preview`, `machine`, `special_tokens`: findings of `qarl check`, which refuse nothing.

Up to `files` nothing imports torch. `prepare` does the rest, and returns what the run takes.
Names of fields and schemes were checked when the configuration was made.
"""

from typing import TYPE_CHECKING

from qarl.configs.schema.run import RunConfig
from qarl.preflight.files import check_files
from qarl.preflight.schemes import check_schemes
from qarl.quant.runtime.imports import collections_paused
from qarl.report.startup import phase

if TYPE_CHECKING:  # which imports torch
    from qarl.run.policy import RunInputs


def preflight(config: RunConfig, new: bool = False) -> "RunInputs":
    """Check a configuration for this process alone, and return what its run takes.

    new: whether the run's folder is to be made. Raises the error of the part that is wrong.
    """
    with phase("checking files, task and reward"):
        check_schemes(config)
        task = check_files(config, new)
    with phase("importing torch, transformers and compressed-tensors"), collections_paused():
        from qarl.preflight.prepare import prepare
    return prepare(config, task)
