"""`qarl export`: a run's newest checkpoint as a deployable folder, proven in a fresh engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.configs.schema.run import RunConfig
from qarl.quant.digest import StreamDigest
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase
from qarl.rollout.open import open_engine
from qarl.run.checkpoint import load_checkpoint
from qarl.run.export_note import export_note
from qarl.run.model_card import write_card
from qarl.run.policy import TrainingPolicy, open_policy
from qarl.run.served import Served, note_served, policy_defaults
from qarl.run.session import canary_sequences
from qarl.sync.export import export_checkpoint
from qarl.sync.publisher import Publisher


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    step: int
    """Step of the exported checkpoint."""
    written: StreamDigest
    """Digest of the tensors written."""
    moved: float
    """Mean |Δ log p| of fixed sequences between a fresh engine and the exported policy, nats."""
    calibration: tuple[tuple[int, ...], ...] = ()
    """Calibration sequences of post-training quantization, token ids."""
    served: Served | None = None
    """Comparison of the served export with its evaluation; None if there was none."""


def export_run(run: Path, output: Path) -> Exported:
    """Write a run's newest checkpoint to `output` as a deployable folder, and verify it.

    The tensors are written through the publish stream. A fresh engine then loads the folder.
    Raises `PublishError` if its log-probs differ from the learner's by more than two correct
    implementations differ (`sync.floor`).
    """
    folder = RunFolder.open(run)
    config = folder.config()
    with phase("reading the run's checkpoint"):
        checkpoint = load_checkpoint(folder.checkpoints)
        step = checkpoint.step
    with phase("loading the model"):
        policy = open_policy(config)
        policy.learner.load_state_dict(checkpoint.learner_state(policy.learner))
    note = export_note(run, config, step, output, policy.folder)
    with phase("writing the deployable checkpoint"):
        written = write_export(policy, config, output, note)
    with (
        phase("verifying it in a fresh engine"),
        open_engine(output, config.rollout, config.dtype) as engine,
    ):
        sequences = canary_sequences(policy, config)
        bound = config.sync.canary_bound
        canary = Publisher(policy.model, engine, sequences, bound, canary_every=1).canary(step)
    served = note_served(output, policy, config)
    write_card(output)
    return Exported(step, written, canary.mean_abs, served=served)


def write_export(
    policy: TrainingPolicy, config: RunConfig, folder: Path, note: dict[str, Any]
) -> StreamDigest:
    """Write the present weight version into a folder as a deployable checkpoint, which names how
    the run asks its policy, and return the digest of the tensors written.

    note: content of its qarl.json. Raises what `export_checkpoint` raises.
    """
    defaults = policy_defaults(policy, config)
    return export_checkpoint(policy.model, policy.folder, folder, note, defaults)
