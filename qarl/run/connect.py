"""A model's sampler: an engine started on its present tensors, audited, and the publisher between the two."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from qarl.configs.schema.run import RunConfig
from qarl.learner.mismatch import Mismatch
from qarl.learner.processes import Processes
from qarl.learner.reserve import reserved
from qarl.quant.kernels import KernelError
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.report.startup import phase
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.sync.audit import AuditRow, audit, require_agreement
from qarl.sync.export import export_checkpoint
from qarl.sync.gate import require_equal, require_same_policy
from qarl.sync.publisher import Publisher


@dataclass(frozen=True)
class Connection:
    """A running engine. audited: the layer table both sides agreed on. multiplies: what the learner multiplies with, in
    words."""

    engine: Engine
    publisher: Publisher
    audited: list[AuditRow]
    multiplies: str


@contextmanager
def connected(
    model: LowBitModel,
    source: Path,
    start: Path,
    config: RunConfig,
    sequences: Sequence[Sequence[int]],
    processes: Processes,
) -> Iterator[Connection]:
    """Start the engine on the model's present tensors and audit it; it is closed at the end of the `with`.

    source: folder with the tokenizer. start: folder that the engine loads, written anew. sequences: of the canary.
    Raises `AuditError` where learner and engine disagree about a layer.
    """

    def export() -> None:
        shutil.rmtree(start, ignore_errors=True)
        export_checkpoint(model, source, start)

    processes.first_does(export)
    if not config.learner.keep_codes:
        model.release_codes()
    with ExitStack() as stack:
        room = reserved(model, config.learner, processes.world)
        with phase("starting the engine"), room:
            opened = open_engine(start, config.rollout, config.dtype, processes.world > 1, use_servers=True)
            engine = stack.enter_context(opened)
        bound = 0.0 if config.bitwise else config.sync.canary_bound or model.plan.bound
        publisher = Publisher(model, engine, sequences, bound, config.sync.canary_every, processes)
        same_kernels = config.learner.aligned and config.learner.kernel in ("auto", "vllm")
        multiplies = _share_layers(publisher, stack) if same_kernels else "layers of its own"
        same_bits = config.bitwise and model.device.type == "cuda"
        rows = audit(model.layers(), engine.layers(), same_kernels, same_bits)
        require_agreement(rows)
        yield Connection(engine, publisher, rows, multiplies)


def _share_layers(publisher: Publisher, stack: ExitStack) -> str:
    """Have the learner use the engine's layers, until `stack` is closed; what it multiplies with, in words."""
    try:
        publisher.share_layers()
    except KernelError as reason:
        return f"layers of its own: {reason}"
    stack.callback(publisher.unshare)
    return "the engine's own layers"


def gate_of(config: RunConfig, model: LowBitModel) -> Callable[[Mismatch], None] | None:
    """What refuses a first batch whose mismatch is beyond the bounds; None for an unaligned learner, whose mismatch is
    intended."""
    if not config.learner.aligned:
        return None
    if config.bitwise:
        return require_equal
    bound, k3_bound = config.sync.gate_bound or model.plan.bound, config.sync.gate_k3_bound or model.plan.k3_bound
    return lambda mismatch: require_same_policy(mismatch, bound, k3_bound)
