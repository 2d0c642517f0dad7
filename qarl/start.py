"""The start of a run, new or resumed: its inputs are digested, its policy and position opened."""

from qarl.configs.schema.run import RunConfig
from qarl.learner.processes import Processes
from qarl.ptq.export import initial_codes
from qarl.quant.model.kept_scales import start_from_codes
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase, say
from qarl.run.checkpoint import load_checkpoint
from qarl.run.inputs import Inputs, digest_inputs, require_same_inputs
from qarl.run.policy import CheckedInputs, TrainingPolicy, open_checked_inputs, open_policy
from qarl.run.session import Position


def open_run(
    config: RunConfig,
    folder: RunFolder,
    processes: Processes,
    resume: bool,
    ready: CheckedInputs | None,
    allow_changed_inputs: bool,
) -> tuple[TrainingPolicy, Position, Inputs]:
    """Load the policy and the run's position: from the newest checkpoint, or for a new run.

    Also returns the digests of the run's inputs, in the first process alone, which writes them.
    ready: what the run's checks returned. Raises `ChangedInputsError` before anything is loaded if
    the checkpoint was made from other inputs, unless they may change.
    """
    ready = ready or open_checked_inputs(config)
    inputs = digest_inputs(config, ready.task) if processes.first else {}
    if resume:
        processes.run_on_first(
            lambda: require_same_inputs(config, folder, inputs, allow_changed_inputs)
        )
    with phase("loading the model"):
        policy = open_policy(config, processes, ready)
    if resume:
        checkpoint = load_checkpoint(folder.checkpoints, processes, step_over=say)
        policy.learner.load_state_dict(checkpoint.learner_state(policy.learner))
        return policy, Position(**checkpoint.state["position"]), inputs
    if config.quantization.init is not None:
        with phase(f"calibrating codes by {config.quantization.init}"):
            codes = initial_codes(policy, config)
            start_from_codes(policy.model, codes, keep_masters=not config.learner.aligned)
    return policy, Position(), inputs
