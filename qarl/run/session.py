"""Assembling a run: model, learner, engine, publisher, and the audit that lets it start."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qarl.configs.schema.run import RunConfig
from qarl.learner.learner import FirstBatchGate
from qarl.learner.processes import Processes
from qarl.learner.reserve import reserved
from qarl.quant.kernels import KernelError
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.row_check import RowCheck
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase
from qarl.rollout.absent import AbsentEngine
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.run.policy import Policy, let_go
from qarl.sync.audit import AuditRow, audit, require_agreement, require_equal_rows
from qarl.sync.export import export_checkpoint
from qarl.sync.floor import tolerance
from qarl.sync.gate import Gate, require_equal
from qarl.sync.publisher import Publisher

_CANARY_SEQUENCES = 8


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
