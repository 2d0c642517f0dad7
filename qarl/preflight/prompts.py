"""Check of a run's prompts: the tokenizer, its chat template and the questions' lengths."""

from qarl.configs.schema.run import RunConfig
from qarl.quant.checkpoint.check_folder import check_folder
from qarl.run.policy import Architecture, RunInputs, open_inputs
from qarl.tasks import Split, Task


def check_prompts(config: RunConfig, task: Task, architecture: Architecture) -> RunInputs:
    """Make a prompt of one problem of every split in use, and return what the run takes.

    task, architecture: those of the configuration. Raises `ModelError` for a tokenizer or chat
    template that does not work, `ConfigError` for a prompt that is too long, `TaskError` if no
    question is short enough.
    """
    # A local folder was checked before torch was imported (`qarl.preflight.files`); an embedded
    # model's and a hub snapshot exist only now.
    check_folder(architecture.folder, config.rollout.longest)
    inputs = open_inputs(config, task, architecture)
    splits: tuple[Split, ...] = ("train", "heldout") if config.eval.problems else ("train",)
    for split in splits:
        inputs.prompter.prompt(inputs.task.problems(split, 0, 1, config.seed)[0])
    return inputs
