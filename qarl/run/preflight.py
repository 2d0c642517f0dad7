"""Checks before a run starts that need torch: the machine's kernels, the model, its tokenizer and
the prompts. `qarl.run.check` has those that do without torch.
"""

import torch
from transformers import PreTrainedModel

from qarl.configs.errors import ConfigError
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.learner.gradients import require_compiler
from qarl.learner.objectives import find_objective
from qarl.quant.checkpoint.folder import check_folder
from qarl.quant.checkpoint.load import model_skeleton
from qarl.quant.checkpoint.shapes import expert_modules, plan_layers, weight_shapes
from qarl.quant.kernels.cpu_attention import require_head_size
from qarl.quant.kernels.supported import require_cache, require_support
from qarl.quant.model.add_lora import adapted_weights
from qarl.quant.model.kept_scales import check_scale_rule
from qarl.quant.runtime.batch_invariance import batch_invariant
from qarl.quant.runtime.libraries import has_vllm, refuse_split_keys, untested_vllm
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.report.startup import phase, say
from qarl.run.check import check_processes
from qarl.run.disk import check_disk
from qarl.run.policy import enable_batch_invariance, model_folder
from qarl.run.prompts import open_prompter
from qarl.tasks import Split, Task


def require_schemes(config: RunConfig, model: PreTrainedModel | None = None) -> None:
    """Raise an error if the run's schemes do not fit the model or cannot run on this machine.

    `SchemeError`: a scheme is unknown, layer rules do not fit the model, a scheme cannot hold a
    shape or cannot run on this machine. `LoraError`: adapters do not fit the model. Of the model,
    only config.json is read. model: a loaded model to check instead of the configuration's.
    """
    enable_batch_invariance(config)
    dtype = COMPUTE_DTYPES[config.dtype]
    if not torch.cuda.is_available():
        refuse_split_keys()
    require_cache(config.quantization.kv_cache)
    require_support(get_scheme(config.scheme), dtype)  # before the model is located
    skeleton = model_skeleton(model_folder(config.model)) if model is None else model
    if config.engine_here and has_vllm() and not torch.cuda.is_available():
        require_head_size(config.model, skeleton.config)
    plan = plan_layers(skeleton, get_scheme(config.scheme), config.layers)
    check_scale_rule(config.quantization.scale, plan)
    if isinstance(config.learner.lora, LoraConfig):
        adapted_weights(weight_shapes(skeleton), skeleton.config.model_type, config.learner.lora)
    experts = tuple(f"{name}." for name in expert_modules(skeleton))
    if experts and batch_invariant():
        raise ConfigError(
            f"bitwise true with {config.model!r}, a mixture of experts: that its routers' products"
            " are batch-invariant on GPUs has not been shown; leave bitwise out"
        )
    kinds = {(scheme.name, name.startswith(experts)) for name, scheme in plan.schemes.items()}
    for name, is_expert in sorted(kinds):
        require_support(get_scheme(name), dtype, is_expert)


def check_input(config: RunConfig, task: Task, processes: int = 1) -> None:
    """Check schemes, objective, layer rules, model, prompts and number of processes.

    This runs before a run folder is made. It raises the error of the part that is wrong
    (`SchemeError`, `TaskError`, `ModelError`, `ConfigError`). task: the configuration's task, as
    `qarl.run.check.check_files` returns it.
    """
    check_processes(config, processes)
    if config.learner.compile is True:
        require_compiler("cuda" if torch.cuda.is_available() else "cpu")
    find_objective(config.learner.objective)
    with phase("checking kernels"):
        require_schemes(config)
    with phase("checking tokenizer and prompts"):
        described = check_prompts(config, task)
    check_disk(config, model_folder(config.model))
    for line in filter(None, (described, untested_vllm())):
        say(line)


def check_prompts(config: RunConfig, task: Task) -> str | None:
    """Make a prompt of one problem of every split in use; describe the task's file of questions.

    Returns that description in a line, or None for a built-in task. task: the configuration's task.
    Raises `ModelError` for a tokenizer or chat template that does not work, `ConfigError` for a
    prompt that is too long, `TaskError` if no question is short enough.
    """
    folder = model_folder(config.model)
    check_folder(folder, config.rollout.longest)
    prompter = open_prompter(folder, config.rollout, config.task)
    task = task.shortened(prompter.fits)
    splits: tuple[Split, ...] = ("train", "heldout") if config.eval.problems else ("train",)
    for split in splits:
        prompter.prompt(task.problems(split, 0, 1, config.seed)[0])
    return task.describe()
