"""Loading a run's policy: its model in the run's schemes, its tokenizer, task and learner."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from qarl.configs.deepspeed_file import read_deepspeed_file
from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.learner.gradient_gate import require_gradients
from qarl.learner.learner import Learner
from qarl.learner.optim.sharded import masters_mesh
from qarl.learner.processes import Processes
from qarl.quant.checkpoint.load import (
    load_masters,
    matrices_on_host,
    model_skeleton,
    resolve_model,
)
from qarl.quant.checkpoint.plan import LayerPlan
from qarl.quant.checkpoint.shapes import plan_layers
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.add_lora import add_adapters, describe_adapters
from qarl.quant.model.kept_scales import keep_scales
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.batch_invariance import FIRST_CAPABILITY, turn_on
from qarl.quant.schemes import COMPUTE_DTYPES, MASTER_DTYPES, get_scheme
from qarl.run.prompts import Prompter, open_prompter
from qarl.tasks import Task, load_task


def model_folder(name: str) -> Path:
    """Return the folder of an embedded model (built now if needed), a local model, or a hub
    snapshot.
    """
    from qarl.embedded.real_model import REAL_MODEL, ensure_real_model
    from qarl.embedded.recipe import RECIPES, ensure_tiny

    if name == REAL_MODEL:
        return ensure_real_model()
    return ensure_tiny(name) if name in RECIPES else resolve_model(name)


def enable_batch_invariance(config: RunConfig) -> None:
    """Turn vLLM's batch-invariant mode on in this process if the run is `bitwise` and on a GPU.

    CPUs have no such mode. Raises `ConfigError` for a GPU on which nothing can be learned in it.
    """
    if not (config.bitwise and torch.cuda.is_available()):
        return
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CAPABILITY:
        raise ConfigError(
            f"bitwise true on a GPU of compute capability {capability[0]}.{capability[1]}: below"
            " 9.0 vLLM's batch-invariant mode replaces torch's linear and matmul, for the whole"
            " process, by products without a backward; omit bitwise"
        )
    turn_on()


@dataclass(frozen=True)
class Architecture:
    """A model's folder with what its config.json says, in a run's schemes; no weight is loaded."""

    folder: Path
    """Folder of the model, with tokenizer, config.json and weights."""
    skeleton: PreTrainedModel
    """The model on the meta device: names, kinds and shapes of its layers."""
    layers: LayerPlan
    """The scheme of each layer."""


def open_architecture(config: RunConfig) -> Architecture:
    """Find the model of a configuration, and resolve its schemes.

    Raises what `model_folder`, `model_skeleton` and `plan_layers` raise.
    """
    folder = model_folder(config.model)
    skeleton = model_skeleton(folder)
    layers = plan_layers(skeleton, get_scheme(config.scheme), config.layers)
    return Architecture(folder, skeleton, layers)


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run reads: its model, its task, and the prompter that joins them."""

    architecture: Architecture
    """The model that is trained."""
    task: Task
    """Task of the configuration, without the problems whose prompts are too long."""
    prompter: Prompter
    """Makes prompts of the task's problems, with the model's tokenizer and chat template."""

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self.architecture.folder


def open_inputs(
    config: RunConfig, task: Task | None = None, architecture: Architecture | None = None
) -> RunInputs:
    """Open model, tokenizer and task without checking kernels or memory (`qarl.preflight` does).

    task, architecture: those of the configuration, if they were opened before.
    """
    enable_batch_invariance(config)
    architecture = architecture or open_architecture(config)
    prompter = open_prompter(architecture.folder, config.rollout, config.task)
    task = (task or load_task(config.task)).without_long_prompts(prompter.fits)
    return RunInputs(architecture=architecture, task=task, prompter=prompter)


@dataclass(frozen=True, kw_only=True)
class TrainingPolicy(RunInputs):
    """Everything that is trained or needed for training, except the engine."""

    model: LowBitModel
    """Masters and their low-bit codes."""
    learner: Learner
    """Steps the model's masters."""
    processes: Processes
    """Processes that train together; each has its own `TrainingPolicy`."""


def load_model(
    config: RunConfig,
    architecture: Architecture,
    learner_config: LearnerConfig,
    processes: Processes,
) -> LowBitModel:
    """Load a model's masters, which the processes share, and wrap them in the run's schemes."""
    device = processes.device
    on_host = config.learner.base_on_host
    masters = load_masters(
        architecture.folder,
        MASTER_DTYPES[learner_config.master_dtype],
        None if on_host else device,
        masters_mesh(learner_config, processes),
        architecture.skeleton,
    )
    if on_host:
        masters = matrices_on_host(masters, device)
    return wrap_masters(masters, config, architecture.layers, device if on_host else None)


def wrap_masters(
    masters: PreTrainedModel,
    config: RunConfig,
    layers: LayerPlan,
    device: torch.device | None = None,
) -> LowBitModel:
    """Wrap a model in the run's schemes; its parameters become the masters.

    Raises what `LowBitModel` raises.

    Args:
        masters: the model, in the master dtype.
        config: configuration of the run.
        layers: the scheme of each of the model's layers.
        device: device that multiplies the codes. Default: the device of the masters.
    """
    learner = config.learner
    dtype = COMPUTE_DTYPES[config.dtype]
    compute = MASTER_DTYPES[learner.compute_dtype] if learner.compute_dtype else None
    kv_cache = config.quantization.kv_cache
    ranks = config.rollout.tensor_parallel_size
    context = LayerContext(dtype, learner.kernel, learner.aligned, compute, kv_cache, device, ranks)
    model = LowBitModel(masters, layers, context, learner.operators)
    if config.quantization.scale == "kept":
        keep_scales(model)
    return model


def open_policy(
    config: RunConfig, processes: Processes | None = None, inputs: RunInputs | None = None
) -> TrainingPolicy:
    """Load a run's policy: masters in the run's schemes, prompter, task and learner.

    processes: all launched processes, which open their policies together. None opens the policy in
    this process only, not for learning. inputs: what the run's checks returned. Default: it is
    opened here, without the checks.
    """
    inputs = inputs or open_inputs(config)
    together = processes or Processes()
    learner_config = config.learner
    if not processes:
        learner_config = learner_config.model_copy(update={"compile": False, "deepspeed": None})

    model = load_model(config, inputs.architecture, learner_config, together)
    if isinstance(config.learner.lora, LoraConfig):
        add_adapters(model, config.learner.lora, config.seed)
    # The KL reference is the policy the run started with, in the same schemes: a second set of
    # masters and low-bit tensors in memory. It is made from the model's folder, so a resumed run
    # has the same one. With LoRA it is the base, because B is zero at the start.
    reference = None
    if config.learner.kl.name != "none":
        reference = load_model(config, inputs.architecture, learner_config, together)
        free_uncached(reference, learner_config)
    if processes and model.operators == "engine":
        require_gradients(model, together)
    learner = Learner(
        model,
        learner_config,
        reference,
        together,
        config.seed,
        config.steps,
        config.rollout.temperature,
    )
    return TrainingPolicy(**vars(inputs), model=model, learner=learner, processes=together)


def describe_training(policy: TrainingPolicy, config: RunConfig) -> list[str]:
    """Return lines for the startup output on what is trained, and how it differs from the default.

    They say what LoRA trains and leaves frozen, why an aligned learner's log-probs do not equal the
    engine's to the last bit, the learner's own compute dtype, the engine's ranks, and which
    processes share the work.
    There is no line if one process trains every master in the engine's model and dtype.
    """
    lora = config.learner.lora
    lines = [describe_adapters(policy.model, lora)] if isinstance(lora, LoraConfig) else []
    if policy.model.why_not_engine:
        lines.append(
            "the learner computes norms, rotary embeddings and attention as transformers does, so"
            f" its log-probs are the engine's up to rounding: {policy.model.why_not_engine}"
        )
    if policy.model.context.compute_dtype != policy.model.context.dtype:
        lines.append(
            f"the learner computes in {config.learner.compute_dtype}, the engine in {config.dtype}"
        )
    if policy.model.context.kv_cache and config.learner.aligned:
        lines.append(f"learner and engine read keys and values in {policy.model.context.kv_cache}")
    ranks = config.rollout.tensor_parallel_size
    if ranks > 1:
        lines.append(f"products are rounded and summed as the servers' {ranks} ranks do")
    if policy.processes.world > 1:
        lines.append(f"processes: {policy.processes.world}")
    if config.learner.deepspeed is not None:
        stage = read_deepspeed_file(config.learner.deepspeed).stage
        lines.append(f"DeepSpeed steps the masters: ZeRO {stage}, {config.learner.deepspeed}")
    return lines


def free_uncached(model: LowBitModel, learner: LearnerConfig) -> None:
    """Free the codes and kernel layouts that the configuration does not keep between versions."""
    if not learner.keep_codes:
        model.release_codes()
    if not learner.keep_kernel_layout:
        model.drop_kernels()
