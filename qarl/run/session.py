"""Assembling a run: model, learner, engine, publisher, and the audit that lets it start."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.learner.gradient_gate import require_gradients
from qarl.learner.gradients import require_compiler
from qarl.learner.learner import FirstBatchGate, Learner
from qarl.learner.objectives import find_objective
from qarl.learner.optim.sharded import share_of
from qarl.learner.processes import Processes
from qarl.learner.reserve import reserved
from qarl.quant.checkpoint.folder import check_folder
from qarl.quant.checkpoint.load import (
    load_masters,
    matrices_on_host,
    model_skeleton,
    resolve_model,
)
from qarl.quant.checkpoint.shapes import expert_modules, plan_layers, weight_shapes
from qarl.quant.kernels import KernelError
from qarl.quant.kernels.cpu_attention import require_head_size
from qarl.quant.kernels.supported import require_cache, require_support
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.add_lora import adapted_weights, add_adapters, describe_adapters
from qarl.quant.model.kept_scales import check_scale_rule, keep_scales
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.row_check import RowCheck
from qarl.quant.runtime.batch_invariance import (
    FIRST_CAPABILITY,
    batch_invariant,
    turn_on,
)
from qarl.quant.runtime.libraries import has_vllm, refuse_split_keys, untested_vllm
from qarl.quant.schemes import COMPUTE_DTYPES, MASTER_DTYPES, get_scheme
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase, say
from qarl.rollout.absent import AbsentEngine
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.run.check import check_processes
from qarl.run.disk import check_disk
from qarl.run.prompts import Prompter, open_prompter
from qarl.sync.audit import AuditRow, audit, require_agreement, require_equal_rows
from qarl.sync.export import export_checkpoint
from qarl.sync.floor import tolerance
from qarl.sync.gate import Gate, require_equal
from qarl.sync.publisher import Publisher
from qarl.tasks import Split, Task, load_task

_CANARY_SEQUENCES = 8


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
    """Turn vLLM's batch-invariant mode on in this process, where the run is `bitwise` and on a GPU;
    on CPUs there is nothing to turn on. Raises `ConfigError` for a GPU where nothing can be learned
    in that mode.
    """
    if not (config.bitwise and torch.cuda.is_available()):
        return
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CAPABILITY:
        raise ConfigError(
            f"bitwise true on a GPU of compute capability {capability[0]}.{capability[1]}: below"
            " 9.0 vLLM's batch-invariant mode replaces torch's linear and matmul, for the whole"
            " process, by products without a backward; leave bitwise out"
        )
    turn_on()


def require_schemes(config: RunConfig, model: PreTrainedModel | None = None) -> None:
    """Raise `SchemeError` for an unknown scheme, for rules that do not fit the model, for shapes a
    scheme cannot hold, and for a scheme that cannot run on this machine; `LoraError` for adapters
    that do not fit the model. Only the model's config.json is read. model: one that is loaded
    already, in place of the configuration's.
    """
    enable_batch_invariance(config)
    dtype = COMPUTE_DTYPES[config.dtype]
    if not torch.cuda.is_available():
        refuse_split_keys()
    require_cache(config.quantization.kv_cache)
    require_support(get_scheme(config.scheme), dtype)  # before the model is looked for
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
    for name, of_experts in sorted(kinds):
        require_support(get_scheme(name), dtype, of_experts)


def check_input(config: RunConfig, task: Task, processes: int = 1) -> None:
    """Everything that can be found wrong with schemes, objective, layer rules, model, prompts and
    the number of processes before a run folder is made. task: of the configuration, as
    `qarl.run.check.check_files` returns it.

    Raises the error of the part that is wrong (`SchemeError`, `TaskError`, `ModelError`,
    `ConfigError`).
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
    """What a file of questions comes down to, in a line; None for a built-in task. task: of the
    configuration, tried on one problem of every split in use.

    Raises `ModelError` for a tokenizer or chat template that does not work, `ConfigError` for a
    prompt that is too long, `TaskError` where no question is short enough.
    """
    folder = model_folder(config.model)
    check_folder(folder, config.rollout.longest)
    prompter = open_prompter(folder, config.rollout, config.task)
    task = task.shortened(prompter.fits)
    splits: tuple[Split, ...] = ("train", "heldout") if config.eval.problems else ("train",)
    for split in splits:
        prompter.prompt(task.problems(split, 0, 1, config.seed)[0])
    return task.describe()


@dataclass
class Policy:
    """What is trained, without an engine. folder: where tokenizer and architecture came from.
    processes: those that train it, each with a policy of its own.
    """

    folder: Path
    task: Task
    prompter: Prompter
    model: LowBitModel
    learner: Learner
    processes: Processes


def load_model(
    config: RunConfig, folder: Path, learning: LearnerConfig, processes: Processes
) -> LowBitModel:
    """A folder's masters in the run's schemes. learning: whose `zero_stage` says how processes
    share them.
    """
    schemes = [
        get_scheme(config.scheme),
        *(get_scheme(rule.scheme) for rule in config.layers),
    ]
    waits, share = config.learner.base_on_host, share_of(learning, processes, schemes)
    masters = load_masters(
        folder,
        MASTER_DTYPES[learning.master_dtype],
        None if waits else processes.device,
        share,
    )
    masters = matrices_on_host(masters, processes.device) if waits else masters
    return wrap_masters(masters, config, processes.device if waits else None)


def wrap_masters(
    masters: PreTrainedModel, config: RunConfig, device: torch.device | None = None
) -> LowBitModel:
    """A model whose parameters become the masters, in the run's schemes. device: where they are
    multiplied, None where they are. Raises as `LowBitModel`.
    """
    learner = config.learner
    compute = MASTER_DTYPES[learner.compute_dtype] if learner.compute_dtype else None
    dtype, kv_cache = COMPUTE_DTYPES[config.dtype], config.quantization.kv_cache
    context = LayerContext(dtype, learner.kernel, learner.aligned, compute, kv_cache, device)
    model = LowBitModel(
        masters, get_scheme(config.scheme), context, learner.operators, config.layers
    )
    if config.quantization.scale == "kept":
        keep_scales(model)
    return model


def open_policy(
    config: RunConfig, processes: Processes | None = None, task: Task | None = None
) -> Policy:
    """Load masters and wrap them in the run's schemes. processes: all that were launched, which
    open theirs together; None opens the policy in this process, to learn nothing. task: of the
    configuration, where it is loaded already.
    """
    enable_batch_invariance(config)
    folder = model_folder(config.model)
    prompter = open_prompter(folder, config.rollout, config.task)
    task = (task or load_task(config.task)).shortened(prompter.fits)
    together = processes or Processes()
    alone = {"zero_stage": None, "compile": False}
    learning = config.learner if processes else config.learner.model_copy(update=alone)

    model = load_model(config, folder, learning, together)
    if isinstance(config.learner.lora, LoraConfig):
        add_adapters(model, config.learner.lora, config.seed)
    # The policy the run started with, in the same schemes: a second set of masters and low-bit
    # tensors in memory. It is made from the model's folder, so a resumed run has the same one. With
    # LoRA it is the base, whose B is zero.
    reference = (
        load_model(config, folder, learning, together) if config.learner.kl.name != "none" else None
    )
    if reference is not None:
        let_go(reference, learning)
    if processes and model.operators == "engine":
        require_gradients(model, together)
    learner = Learner(
        model,
        learning,
        reference,
        together,
        config.seed,
        config.steps,
        config.rollout.temperature,
    )
    return Policy(
        folder=folder,
        task=task,
        prompter=prompter,
        model=model,
        learner=learner,
        processes=together,
    )


def trained_part(policy: Policy, config: RunConfig) -> list[str]:
    """For the startup output: why an aligned learner's log-probs are not the engine's to the last
    bit, its own compute dtype, what LoRA trains and what it leaves frozen, and the processes that
    share the work; nothing where one process trains every master in the engine's model and dtype.
    """
    lora, stage = config.learner.lora, config.learner.zero_stage
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
    if policy.processes.world > 1 or stage is not None:
        lines.append(f"processes: {policy.processes.world}, ZeRO stage {stage or 0}")
    return lines


@dataclass
class Position:
    """Where a run stands: what a checkpoint holds besides the learner.

    step: training steps done. version: of the weights in the engine. skipped_batches: whose rewards
    were all equal. first_accuracy, first_reward: held-out, before step 1 (`Heldout`); None where
    not measured. ahead: the batches of the next steps as plain data, where they were sampled
    already (`qarl.run.rollouts`).
    """

    step: int = 0
    version: int = 0
    skipped_batches: int = 0
    first_accuracy: float | None = None
    first_reward: float | None = None
    ahead: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class Connection:
    """A running engine. audited: the layer table both sides agreed on. multiplies: the learner's
    products, in words. rows: what the self-test of its kernels found; None where the learner does
    not multiply as the engine does.
    """

    engine: Engine
    publisher: Publisher
    audited: list[AuditRow]
    multiplies: str
    rows: RowCheck | None = None

    def describe(self) -> list[str]:
        """Return a line on the learner's products, and one on the self-test of their kernels."""
        return [
            f"learner multiplies with {self.multiplies}",
            *([] if self.rows is None else [str(self.rows)]),
        ]


@dataclass(kw_only=True)
class Session(Connection):
    """A policy with its running engine. gate: see `gate_of`."""

    policy: Policy
    gate: FirstBatchGate | None


@contextmanager
def open_session(config: RunConfig, folder: RunFolder, policy: Policy) -> Iterator[Session]:
    """Start the engine on the policy's present tensors and audit it; it is closed at the end of the
    `with`. A replay (`from_rollouts`) has none: nothing to audit, and what is published is digested
    and let go.

    Raises `AuditError` where learner and engine disagree about a layer.
    """
    if config.from_rollouts is not None:
        let_go(policy.model, config.learner)
        yield _replay_session(config, policy)
        return
    sequences = canary_sequences(policy, config)
    start = folder.engine_start
    with connected(
        policy.model, policy.folder, start, config, sequences, policy.processes
    ) as connection:
        yield Session(
            policy=policy,
            gate=gate_of(config, policy.model, connection.rows),
            **vars(connection),
        )


def let_go(model: LowBitModel, learner: LearnerConfig) -> None:
    """Of what the configuration does not have a process keep of a version."""
    if not learner.keep_codes:
        model.release_codes()
    if not learner.keep_kernel_layout:
        model.drop_products()


def _replay_session(config: RunConfig, policy: Policy) -> Session:
    engine = AbsentEngine()
    return Session(
        policy=policy,
        engine=engine,
        publisher=Publisher(
            policy.model, engine, (), None, config.sync.canary_every, policy.processes
        ),
        audited=[AuditRow(layer.name, layer, None, "") for layer in policy.model.layers()],
        multiplies="layers of its own: a replay has no engine",
        gate=gate_of(config, policy.model),
    )


@contextmanager
def connected(
    model: LowBitModel,
    source: Path,
    start: Path,
    config: RunConfig,
    sequences: Sequence[Sequence[int]],
    processes: Processes,
) -> Iterator[Connection]:
    """Start the engine on the model's present tensors and audit it; it is closed at the end of the
    `with`.

    source: folder with the tokenizer. start: folder that the engine loads, written anew. sequences:
    of the canary. Raises `AuditError` where learner and engine disagree about a layer.
    """

    def export() -> None:
        shutil.rmtree(start, ignore_errors=True)
        export_checkpoint(model, source, start)

    processes.first_does(export)
    let_go(model, config.learner)
    with ExitStack() as stack:
        room = reserved(model, config.learner, processes.world)
        with phase("starting the engine"), room:
            opened = open_engine(
                start,
                config.rollout,
                config.dtype,
                processes.world > 1,
                use_servers=True,
            )
            engine = stack.enter_context(opened)
        bound = 0.0 if config.bitwise else config.sync.canary_bound
        publisher = Publisher(model, engine, sequences, bound, config.sync.canary_every, processes)
        same_kernels = config.learner.aligned and config.learner.kernel in (
            "auto",
            "vllm",
        )
        multiplies = share_layers(publisher, stack) if same_kernels else "layers of its own"
        same_bits = config.bitwise and model.device.type == "cuda"
        rows = audit(model.layers(), engine.layers(), same_kernels, same_bits)
        require_agreement(rows)
        checked = model.check_rows() if same_kernels else None
        if checked is not None and config.bitwise:
            require_equal_rows(checked)
        publisher.tolerate(tolerance(model, checked))
        yield Connection(
            engine=engine,
            publisher=publisher,
            audited=rows,
            multiplies=multiplies,
            rows=checked,
        )


def share_layers(publisher: Publisher, stack: ExitStack) -> str:
    """Have the learner use the engine's layers, until `stack` is closed; what it multiplies with,
    in words.
    """
    try:
        publisher.share_layers()
    except KernelError as reason:
        return f"layers of its own: {reason}"
    stack.callback(publisher.unshare)
    return "the engine's own layers"


def gate_of(
    config: RunConfig, model: LowBitModel, rows: RowCheck | None = None
) -> FirstBatchGate | None:
    """What refuses a first batch whose mismatch is out of bounds; None unaligned, where mismatch is
    intended. rows: the self-test of the kernels, see `tolerance`.
    """
    if not config.learner.aligned:
        return None
    if config.bitwise:
        return require_equal
    sync = config.sync
    return Gate(
        bound=sync.gate_bound,
        k3_bound=sync.gate_k3_bound,
        tolerance=tolerance(model, rows),
    )


def canary_sequences(policy: Policy, config: RunConfig) -> list[list[int]]:
    """Fixed token sequences: prompts with their reference answers, held-out ones where there
    are.
    """
    # a task may have no held-out problems then
    split = "heldout" if config.eval.problems else "train"
    problems = policy.task.problems(split, 0, _CANARY_SEQUENCES, config.seed)
    sequences = []
    for problem in problems:
        answer = policy.prompter.tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
        sequences.append(
            [*policy.prompter.prompt(problem).token_ids, *answer][: config.rollout.longest - 1]
        )
    return sequences
