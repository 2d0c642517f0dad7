"""The end of a run: export the policy that was sampled, and prove the export in a fresh engine."""

import shutil
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

from qarl.configs.files import written_aside
from qarl.configs.schema.run import RunConfig
from qarl.learner.processes import leave_processes
from qarl.report.run_folder import RunFolder
from qarl.rollout.open import open_engine
from qarl.run.evaluate import evaluate_task
from qarl.run.export import write_export
from qarl.run.export_note import add_to_note, export_note
from qarl.run.model_card import write_card
from qarl.run.policy import TrainingPolicy
from qarl.run.served import Served, note_served
from qarl.run.session import Position, Session, canary_sequences
from qarl.sync.export import ExportError
from qarl.sync.floor import OTHER_KERNELS_TOLERANCE, SAME_KERNELS_TOLERANCE, FixedSequences


@dataclass(frozen=True)
class RunOutcome:
    """Result of a run; accuracies and rewards are held-out ones (`Heldout`)."""

    run: Path
    """Folder of the run."""
    steps: int
    """Steps done."""
    export: Path | None = None
    """Folder of the deployable checkpoint, None if not requested or the run was interrupted."""
    first_accuracy: float | None = None
    """Accuracy of the policy before training."""
    export_accuracy: float | None = None
    """Accuracy of the loaded export."""
    first_reward: float | None = None
    """Reward of the policy before training."""
    export_reward: float | None = None
    """Reward of the loaded export."""
    stopped_by: int | None = None
    """Number of the signal that stopped the run, None if it was not stopped."""
    served: Served | None = None
    """Comparison of the served export with its evaluation; None if there was none."""


@dataclass(frozen=True)
class ExportReference:
    """Log-probs of fixed sequences by the engine that sampled, which an export must reproduce."""

    sequences: list[list[int]]
    """Token ids."""
    logprobs: list[list[float]]
    """fp32 log-probs of the sequences' tokens, nats."""
    bound: float | None
    """Upper bound on a fresh engine's mean |Δ log p|, nats. None: every bit must be equal."""


def export_sampled(
    session: Session, config: RunConfig, folder: RunFolder, steps: int
) -> ExportReference | None:
    """Write the deployable checkpoint of a finished run, and return the log-probs it has to give.

    None if the run was interrupted or has no export. Collective: every process must call this; the
    first one writes.
    """
    policy = session.policy
    if steps < config.steps or not config.export:
        return None
    export_policy(policy, config, folder, steps, folder.export)
    sequences = canary_sequences(policy, config)
    if config.rollout.tensor_parallel_size > 1:
        return _one_rank_reference(policy, config, sequences)
    bound = None
    if policy.model.device.type != "cpu" and not config.bitwise:
        # Products on GPUs may add up in another order from one call to the next.
        floor = FixedSequences(policy.model, sequences).floor
        bound = config.sync.canary_bound or OTHER_KERNELS_TOLERANCE * floor().mean_abs
    reference = ExportReference(sequences, session.engine.logprobs(sequences), bound)
    policy.processes.barrier()  # from here on the first process is alone
    return reference


def _one_rank_reference(
    policy: TrainingPolicy, config: RunConfig, sequences: list[list[int]]
) -> ExportReference:
    """Return the learner's log-probs as an engine of one rank has them.

    The fresh engine is such a one. That the learner's are the sampler's, with its ranks, is what
    the canary proves.
    """
    fixed = FixedSequences(policy.model, sequences)
    with policy.model.context.one_rank():
        scored = zip(fixed.logprobs(), fixed.response_mask, strict=True)
        logprobs = [row[mask].tolist() for row, mask in scored]
        on_cpu = policy.model.device.type == "cpu"
        multiple = SAME_KERNELS_TOLERANCE if on_cpu else OTHER_KERNELS_TOLERANCE
        bound = config.sync.canary_bound or multiple * fixed.floor().mean_abs
    policy.processes.barrier()
    return ExportReference(sequences, logprobs, bound)


def export_policy(
    policy: TrainingPolicy,
    config: RunConfig,
    folder: RunFolder,
    step: int,
    export: Path,
    **more: Any,
) -> None:
    """Write the present weight version as a deployable checkpoint, replacing an earlier one.

    Collective: every process must call this; the first one writes. more: further entries of its
    qarl.json.
    """
    if policy.processes.first:
        note = {**export_note(folder.path, config, step, export, policy.folder), **more}
        with written_aside(export) as building:
            write_export(policy, config, building, note)
            # left by an earlier end, if a finished run was resumed
            shutil.rmtree(export, ignore_errors=True)
    elif not config.learner.keep_codes:
        for _ in policy.model.low_bit_tensors():
            pass  # making the tensors is collective


def finish(
    policy: TrainingPolicy,
    config: RunConfig,
    folder: RunFolder,
    position: Position,
    reference: ExportReference | None,
    stopped_by: int | None = None,
) -> RunOutcome:
    """Load the export in a fresh engine, compare it with `reference`, and evaluate it.

    Raises `ExportError` if its log-probs differ from those of the engine that sampled: on CPUs, and
    with `bitwise`, in any bit; otherwise on CUDA by more than the bound of `reference`.

    stopped_by: number of the signal that stopped the run, or None.
    """
    unfinished = position.step < config.steps or config.export
    begun = RunOutcome(
        folder.path,
        position.step,
        first_accuracy=position.first_accuracy,
        first_reward=position.first_reward,
        stopped_by=stopped_by if unfinished else None,
    )
    # The process group is still open if servers sampled. An engine in this process would wait in it
    # for processes that have ended.
    leave_processes()
    if reference is None or not policy.processes.first:
        return begun
    accuracy = reward = None
    with open_engine(folder.export, config.rollout, config.dtype) as engine:
        difference = difference_beyond(
            reference.bound, engine.logprobs(reference.sequences), reference.logprobs
        )
        if difference is not None:
            raise ExportError(
                f"the export {str(folder.export)!r}, loaded in a fresh engine, gives other"
                f" log-probs than the engine it was sampled from{difference}; do not deploy it"
            )
        if config.eval.problems:
            result = evaluate_task(
                engine, policy.task, policy.prompter, config.eval, config.rollout
            )
            accuracy = result.accuracy
            reward = result.reward
            average = result.average()
            interval = None if isnan(average.low) else [average.low, average.high]
            figures = {
                "heldout_accuracy": accuracy,
                "heldout_reward": reward,
                "heldout_interval": interval,
            }
            add_to_note(folder.export, **figures, heldout_problems=len(result.questions))
    served = note_served(folder.export, policy, config)
    write_card(folder.export)
    # Written last: a resumed run that finds this entry has nothing left to do.
    add_to_note(folder.export, verified=True)
    return replace(
        begun,
        export=folder.export,
        export_accuracy=accuracy,
        export_reward=reward,
        served=served,
    )


def difference_beyond(
    bound: float | None, actual: list[list[float]], expected: list[list[float]]
) -> str | None:
    """Return in words how much log-probs of the same sequences differ, or None if they agree.

    They agree if their mean |Δ|, in nats, is at most `bound`, or, with bound None, if all are equal
    to the last bit. NaN is beyond any bound.
    """
    if bound is None:
        return None if actual == expected else ""
    pairs = [
        pair for rows in zip(actual, expected, strict=True) for pair in zip(*rows, strict=True)
    ]
    mean = sum(abs(a - b) for a, b in pairs) / len(pairs)
    if mean <= bound:
        return None
    return (
        f", by {mean:.4g} nats a token in the mean, above the bound {bound:.4g} (sync.canary_bound)"
    )
