"""A run's session: the policy connected to a running engine, after both passed the audit."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import Heldout, heldout
from qarl.learner.learner import FirstBatchGate
from qarl.learner.processes import Processes
from qarl.learner.reserve import reserved
from qarl.quant.checkpoint.settings import has_states
from qarl.quant.kernels import KernelError
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.operator_check import OperatorCheck, check_operators
from qarl.quant.model.row_check import RowCheck
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase
from qarl.rollout.absent import AbsentEngine
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Sampling
from qarl.run.picture_check import PictureCheck, check_pictures, require_right_pictures
from qarl.run.policy import TrainingPolicy, free_uncached
from qarl.sync.audit import (
    AuditRow,
    audit,
    require_agreement,
    require_equal_rows,
    require_right_operators,
)
from qarl.sync.export import export_checkpoint
from qarl.sync.floor import tolerance
from qarl.sync.gate import Gate, require_equal_logprobs
from qarl.sync.publisher import Publisher

_UNCACHED = (
    "rollout.prefix_caching is off here: this model has layers with a state (delta nets, Mamba or"
    " convolutions), and vLLM caches states only with chunked prefill, which rounds differently"
)
_FIRST_PROBLEMS = 64
"""Number of the first problems among which one with pictures is looked for."""
CANARY_SEQUENCES = 8
"""Number of fixed sequences whose log-probs are compared after a publish."""


@dataclass
class Position:
    """Progress of a run: the part of a checkpoint that is not the learner's."""

    step: int = 0
    """Training steps done."""
    version: int = 0
    """Version of the weights in the engine."""
    skipped_batches: int = 0
    """Batches nothing was learned from, because all rewards of each group were equal."""
    first_accuracy: float | None = None
    """Held-out accuracy before step 1 (`Heldout`), None if not measured."""
    first_reward: float | None = None
    """Held-out reward before step 1 (`Heldout`), None if not measured."""
    ahead: list[dict[str, Any]] = field(default_factory=list)
    """Batches of the next steps that are already sampled, as plain data (`qarl.run.rollouts`)."""

    @property
    def heldout_before(self) -> Heldout | None:
        """Held-out figures before step 1, None if not measured."""
        return heldout({"accuracy": self.first_accuracy, "heldout_reward": self.first_reward})


@dataclass(kw_only=True)
class Connection:
    """A running engine and the publisher that feeds it."""

    engine: SamplingEngine
    publisher: Publisher
    audited: list[AuditRow]
    """Layer table that learner and engine agreed on."""
    multiplies: str
    """Layers that the learner multiplies with, in words."""
    row_check: RowCheck | None = None
    """Result of the kernels' self-test, None if the learner does not use the engine's kernels."""
    operator_check: OperatorCheck | None = None
    """Comparison of vLLM's operators with transformers', None if the learner does not use them."""
    uncached: bool = False
    """Whether the engine caches no prompts although `rollout.prefix_caching` is true."""
    picture_check: PictureCheck | None = None
    """Comparison of a prompt with pictures with transformers', None if prompts are text or the
    masters were trained already.
    """

    def describe(self) -> list[str]:
        """Return lines on the learner's layers, the tests of kernels and operators, the cache."""
        lines = [f"learner multiplies with {self.multiplies}"]
        if self.row_check is not None:
            lines.append(str(self.row_check))
        if self.operator_check is not None:
            lines.append(str(self.operator_check))
        if self.picture_check is not None:
            lines.append(str(self.picture_check))
        if self.uncached:
            lines.append(_UNCACHED)
        return lines


@dataclass(kw_only=True)
class Session(Connection):
    """A policy with its running engine."""

    policy: TrainingPolicy
    gate: FirstBatchGate | None
    """Check that the first batch must pass, see `gate_of`."""


@contextmanager
def open_session(
    config: RunConfig, folder: RunFolder, policy: TrainingPolicy, trained: bool = False
) -> Iterator[Session]:
    """Start the engine on the policy's present tensors and audit it; close it after the `with`.

    trained: whether the masters differ from those in the model's folder. Pictures are compared with
    transformers' (`check_pictures`) only if they do not.

    A replay (`from_rollouts`) has no engine: nothing is audited, and a published version is
    digested and dropped. Raises `AuditError` if learner and engine disagree about a layer.
    """
    if config.from_rollouts is not None:
        free_uncached(policy.model, config.learner)
        yield _replay_session(config, policy)
        return
    sequences = canary_sequences(policy, config)
    with connected(
        policy.model,
        source=policy.folder,
        checkpoint=folder.engine_start,
        config=config,
        sequences=sequences,
        processes=policy.processes,
    ) as connection:
        if config.rollout.pictures and not trained:
            connection.picture_check = _checked_pictures(policy, connection.engine, config.seed)
        yield Session(
            policy=policy,
            gate=gate_of(config, policy.model, connection.row_check),
            **vars(connection),
        )


def _checked_pictures(
    policy: TrainingPolicy, engine: SamplingEngine, seed: int
) -> PictureCheck | None:
    """Compare the first prompt with pictures with transformers'; None if the first are all text.

    Raises `AuditError` if they differ.
    """
    problems = policy.task.problems("train", 0, _FIRST_PROBLEMS, seed)
    problem = next((problem for problem in problems if problem.pictures), None)
    if problem is None:
        return None
    prompt = policy.prompter.prompt(problem)
    ((answer,),) = engine.generate([prompt], Sampling(1, 1, seed=0))
    assert answer.pictures is not None
    checked = check_pictures(policy.model, policy.folder, prompt, answer.pictures)
    require_right_pictures(checked)
    return checked


def _replay_session(config: RunConfig, policy: TrainingPolicy) -> Session:
    engine = AbsentEngine()
    return Session(
        policy=policy,
        engine=engine,
        publisher=Publisher(
            policy.model,
            engine,
            sequences=(),
            bound=None,
            canary_every=config.sync.canary_every,
            processes=policy.processes,
        ),
        audited=[
            AuditRow(name=layer.name, learner=layer, engine=None, problem="")
            for layer in policy.model.layer_reports()
        ],
        multiplies="layers of its own: a replay has no engine",
        gate=gate_of(config, policy.model),
    )


@contextmanager
def connected(
    model: LowBitModel,
    source: Path,
    checkpoint: Path,
    config: RunConfig,
    sequences: Sequence[Sequence[int]],
    processes: Processes,
) -> Iterator[Connection]:
    """Start the engine on the model's present tensors and audit it; close it after the `with`.

    Args:
        source: folder with the tokenizer.
        checkpoint: folder for the checkpoint that the engine loads. It is replaced, and removed at
            the end, because nothing else reads it.
        sequences: token sequences of the canary.

    Raises:
        AuditError: learner and engine disagree about a layer, or vLLM's operators compute another
            model than transformers'.
    """
    operator_check = check_operators(model, sequences)
    # The result is shown everywhere. It refuses a run on CPUs alone, because the comparison has
    # never run on a GPU.
    if operator_check is not None and model.device.type == "cpu":
        require_right_operators(operator_check)

    def export() -> None:
        shutil.rmtree(checkpoint, ignore_errors=True)
        export_checkpoint(model, source, checkpoint)

    processes.run_on_first(export)
    free_uncached(model, config.learner)
    with ExitStack() as stack:
        if processes.first:
            stack.callback(shutil.rmtree, checkpoint, ignore_errors=True)
        # The engine takes what memory is free, so the learner's later needs are reserved meanwhile.
        reservation = reserved(model, config.learner)
        with phase("starting the engine"), reservation:
            opened = open_engine(
                checkpoint,
                config.rollout,
                config.dtype,
                multi_process=processes.world > 1,
                use_servers=True,
            )
            engine = stack.enter_context(opened)
        bound = 0.0 if config.bitwise else config.sync.canary_bound
        publisher = Publisher(model, engine, sequences, bound, config.sync.canary_every, processes)
        same_kernels = config.learner.aligned and config.learner.kernel in ("auto", "vllm")
        multiplies = share_layers(publisher, stack) if same_kernels else "layers of its own"
        same_bits = config.bitwise and model.device.type == "cuda"
        audit_rows = audit(model.layer_reports(), engine.layer_reports(), same_kernels, same_bits)
        require_agreement(audit_rows)
        row_check = model.check_rows() if same_kernels else None
        if row_check is not None and config.bitwise:
            require_equal_rows(row_check)
        publisher.set_tolerance(tolerance(model, row_check))
        yield Connection(
            engine=engine,
            publisher=publisher,
            audited=audit_rows,
            multiplies=multiplies,
            row_check=row_check,
            operator_check=operator_check,
            uncached=config.rollout.prefix_caching and has_states(checkpoint),
        )


def share_layers(publisher: Publisher, stack: ExitStack) -> str:
    """Make the learner multiply with the engine's layers until `stack` is closed.

    Returns in words which layers it multiplies with: its own if the engine's cannot be shared.
    """
    try:
        publisher.share_layers()
    except KernelError as reason:
        return f"layers of its own: {reason}"
    stack.callback(publisher.unshare_layers)
    return "the engine's own layers"


def gate_of(
    config: RunConfig, model: LowBitModel, row_check: RowCheck | None = None
) -> FirstBatchGate | None:
    """Return the check that refuses a first batch whose mismatch is out of bounds.

    None for an unaligned learner, whose mismatch is intended. row_check: result of the kernels'
    self-test, see `tolerance`.
    """
    if not config.learner.aligned:
        return None
    if config.bitwise:
        return require_equal_logprobs
    return Gate(bound=config.sync.gate_bound, tolerance=tolerance(model, row_check))


def canary_sequences(policy: TrainingPolicy, config: RunConfig) -> list[list[int]]:
    """Return fixed token sequences: prompts with their reference answers.

    They are held-out ones unless the run has no held-out evaluation; its task may then have none.
    """
    split = "heldout" if config.eval.problems else "train"
    problems = policy.task.problems(split, 0, CANARY_SEQUENCES, config.seed)
    sequences = []
    for problem in problems:
        answer = policy.prompter.tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
        # A reference answer may have tokens that the embedding has no row for: they are left out.
        known = filter(policy.prompter.vocabulary.has, answer)
        sequence = [*policy.prompter.prompt(problem).token_ids, *known]
        sequences.append(sequence[: config.rollout.longest - 1])
    return sequences
