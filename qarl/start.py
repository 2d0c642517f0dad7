"""The start of a run, new or resumed: what it begins with, and its policy and position opened.

It is beside the loop, above `qarl.run`, because a calibrated start (`qarl.ptq`) loads policies.
"""

from dataclasses import dataclass, field

from qarl.configs.schema.run import RunConfig
from qarl.learner.processes import Processes
from qarl.ptq.export import initial_codes
from qarl.quant.model.kept_scales import start_from_codes
from qarl.report.run_folder import RunFolder
from qarl.report.startup import phase, say
from qarl.run.checkpoint import load_checkpoint
from qarl.run.inputs import InputDigests, digest_inputs, require_same_inputs
from qarl.run.policy import RunInputs, TrainingPolicy, open_inputs, open_policy
from qarl.run.session import Position


@dataclass(frozen=True)
class RunStart:
    """Everything that a run begins with; each of its processes has its own."""

    config: RunConfig
    """Resolved configuration."""
    folder: RunFolder
    """Folder of the run, which exists."""
    processes: Processes = field(default_factory=Processes)
    """Processes that train together. Default: this one alone."""
    inputs: RunInputs | None = None
    """Model, task and prompter as the checks opened them. None: they are opened unchecked."""
    resume: bool = False
    """Whether the run continues from its newest checkpoint."""
    allow_changed_inputs: bool = False
    """Whether it may do so with other questions, functions or model files."""


def open_run(start: RunStart) -> tuple[TrainingPolicy, Position, InputDigests]:
    """Load the policy and the run's position: from the newest checkpoint, or for a new run.

    Also returns the digests of the run's inputs, in the first process alone, which writes them.
    Raises `ChangedInputsError` before anything is loaded if the checkpoint was made from other
    inputs, unless they may change.
    """
    config = start.config
    folder = start.folder
    processes = start.processes
    inputs = start.inputs or open_inputs(config)
    digests = digest_inputs(config, inputs.task) if processes.first else {}
    if start.resume:
        processes.run_on_first(
            lambda: require_same_inputs(config, folder, digests, start.allow_changed_inputs)
        )
    with phase("loading the model"):
        policy = open_policy(config, processes, inputs)
    if start.resume:
        checkpoint = load_checkpoint(folder.checkpoints, processes, report=say)
        policy.learner.load_state_dict(checkpoint.learner_state(policy.learner))
        return policy, Position(**checkpoint.state["position"]), digests
    if config.quantization.init is not None:
        with phase(f"calibrating codes by {config.quantization.init}"):
            codes = initial_codes(policy, config)
            start_from_codes(policy.model, codes, keep_masters=not config.learner.aligned)
    return policy, Position(), digests
