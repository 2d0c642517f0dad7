"""The end of a run: export what was sampled from, and prove it in a fresh engine."""

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
from qarl.run.evaluate import answered
from qarl.run.export_note import add_to_note, export_note, write_card
from qarl.run.policy import Policy
from qarl.run.session import Position, Session, canary_sequences
from qarl.sync.export import ExportError, export_checkpoint
from qarl.sync.floor import ROUNDED, FixedSequences


@dataclass(frozen=True)
class Outcome:
    """run: its folder. steps: done. export: folder of the deployable checkpoint, None if none was
    asked for or the run was interrupted. accuracy, reward: held-out (`Heldout`), of the policy
    before training and of the loaded export.
    """

    run: Path
    steps: int
    export: Path | None = None
    first_accuracy: float | None = None
    export_accuracy: float | None = None
    first_reward: float | None = None
    export_reward: float | None = None


@dataclass(frozen=True)
class ExportReference:
    """What the engine that sampled gave fixed sequences, fp32 log-probs in nats: what an export is
    held to.

    bound: on the mean |Δ log p| that a fresh engine may be off, in nats; None: not by a bit.
    """

    sequences: list[list[int]]
    logprobs: list[list[float]]
    bound: float | None


def export_sampled(
    session: Session, config: RunConfig, folder: RunFolder, steps: int
) -> ExportReference | None:
    """Write the deployable checkpoint of a finished run, beside the log-probs it has to give; None
    where the run was interrupted or asks for no export. All processes come here; the first writes.
    """
    policy = session.policy
    if steps < config.steps or not config.export:
        return None
    write_export(policy, config, folder, steps, folder.export)
    sequences = canary_sequences(policy, config)
    bound = None
    if policy.model.device.type != "cpu" and not config.bitwise:
        # Products on GPUs may add up in another order from one call to the next.
        bound = (
            config.sync.canary_bound
            or ROUNDED * FixedSequences(policy.model, sequences).floor().mean_abs
        )
    sampled = ExportReference(sequences, session.engine.logprobs(sequences), bound)
    policy.processes.wait()  # from here on the first process is alone
    return sampled


def write_export(
    policy: Policy,
    config: RunConfig,
    folder: RunFolder,
    step: int,
    export: Path,
    **more: Any,
) -> None:
    """Write the present weight version as a deployable checkpoint, in place of an earlier one
    there. All processes come here; the first writes. more: of its qarl.json.
    """
    if policy.processes.first:
        note = {**export_note(folder.path, config, step, export, policy.folder), **more}
        with written_aside(export) as building:
            export_checkpoint(policy.model, policy.folder, building, note)
            # of an earlier end, where a finished run was resumed
            shutil.rmtree(export, ignore_errors=True)
    elif not config.learner.keep_codes:
        for _ in policy.model.low_bit_tensors():
            pass  # to make them takes all processes


def finish(
    policy: Policy,
    config: RunConfig,
    folder: RunFolder,
    at: Position,
    sampled: ExportReference | None,
) -> Outcome:
    """Load the export in a fresh engine, hold it to `sampled`, and evaluate it.

    Raises `ExportError` where it gives other log-probs than the engine that sampled: on CPUs, and
    with `bitwise`, in any bit; on CUDA else beyond the bound of `sampled`.
    """
    begun = Outcome(
        folder.path,
        at.step,
        first_accuracy=at.first_accuracy,
        first_reward=at.first_reward,
    )
    # open still where servers sampled; an engine here would wait in it for those that are done
    leave_processes()
    if sampled is None or not policy.processes.first:
        return begun
    accuracy = reward = None
    with open_engine(folder.export, config.rollout, config.dtype) as engine:
        difference = difference_beyond(
            sampled.bound, engine.logprobs(sampled.sequences), sampled.logprobs
        )
        if difference is not None:
            raise ExportError(
                f"the export {str(folder.export)!r}, loaded in a fresh engine, gives other"
                f" log-probs than the engine it was sampled from{difference}; do not deploy it"
            )
        if config.eval.problems:
            result = answered(engine, policy.task, policy.prompter, config.eval, config.rollout)
            accuracy, reward, average = result.accuracy, result.reward, result.average()
            interval = None if isnan(average.low) else [average.low, average.high]
            figures = {
                "heldout_accuracy": accuracy,
                "heldout_reward": reward,
                "heldout_interval": interval,
            }
            add_to_note(folder.export, **figures, heldout_problems=len(result.questions))
    write_card(folder.export)
    # the last of all: a resumed run that finds it has nothing left to do
    add_to_note(folder.export, verified=True)
    return replace(begun, export=folder.export, export_accuracy=accuracy, export_reward=reward)


def difference_beyond(
    bound: float | None, actual: list[list[float]], expected: list[list[float]]
) -> str | None:
    """In words, how far log-probs of the same sequences are apart; None where their mean |Δ|, in
    nats, is within `bound`, or, with bound None, where all are equal to the last bit. NaN is beyond
    any bound.
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
