"""The end of a run: export what was sampled from, and prove it in a fresh engine."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from configs.schema.run import RunConfig
from qarl.report.run_folder import RunFolder
from qarl.run.evaluate import heldout_accuracy
from qarl.run.session import Session, canary_sequences, engine_options
from rollout.vllm.engine import VllmEngine
from sync.checkpoint_folder import ExportError
from sync.export import export_checkpoint


@dataclass(frozen=True)
class Outcome:
    """steps done; export: folder of the deployable checkpoint (None if none was asked for or the run was
    interrupted); accuracies: held-out greedy, of the policy before training and of the export reloaded in a fresh
    engine."""

    steps: int
    export: Path | None
    first_accuracy: float | None
    export_accuracy: float | None


def finish(session: Session, config: RunConfig, folder: RunFolder, steps: int, first: float | None) -> Outcome:
    """Export the policy, load it in a fresh engine, compare bit for bit with the engine that sampled, evaluate."""
    policy = session.policy
    processes = policy.processes
    if steps < config.steps or not config.export:
        session.engine.close()
        return Outcome(steps, None, first, None)
    if processes.first:
        shutil.rmtree(folder.export, ignore_errors=True)  # of an earlier end, where a finished run was resumed
        export_checkpoint(policy.model, policy.folder, folder.export)
    sequences = canary_sequences(policy, config)
    sampled_from = session.engine.score(sequences)
    processes.wait()
    session.engine.close()  # and the process group: from here on the first process is alone
    if not processes.first:
        return Outcome(steps, None, first, None)
    engine = VllmEngine(folder.export, engine_options(config))
    if engine.score(sequences) != sampled_from:
        raise ExportError(
            f"the export {str(folder.export)!r}, loaded in a fresh engine, gives other log-probs than the engine "
            "it was sampled from; do not deploy it"
        )
    accuracy = None
    if config.eval.problems:
        r = config.rollout
        accuracy = heldout_accuracy(engine, policy.task, policy.prompter, config.eval.problems, r.max_new_tokens)
    engine.close()
    return Outcome(steps, folder.export, first, accuracy)
