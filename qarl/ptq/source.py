"""Input of post-training quantization: a run's masters, unquantized, with calibration sequences."""

from dataclasses import dataclass, replace
from pathlib import Path

from qarl.configs.schema.quantization import QuantizationConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import UNQUANTIZED
from qarl.configs.seeds import stable_hash
from qarl.ptq.expected_checkpoint import Layout, checkpoint_layout
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.report.run_folder import RunFolder
from qarl.rollout.engine import SamplingEngine
from qarl.rollout.open import open_engine
from qarl.rollout.types import RequestDefaults, Sampling
from qarl.run.checkpoint import load_checkpoint
from qarl.run.policy import TrainingPolicy, open_policy
from qarl.run.prompts import Prompter, sample
from qarl.run.served import policy_defaults
from qarl.run.session import canary_sequences
from qarl.sync.export import export_checkpoint
from qarl.tasks import Task


@dataclass(frozen=True)
class Source:
    """An unquantized policy, ready to be quantized to one scheme by several methods."""

    config: RunConfig
    step: int
    """Step of the run's checkpoint."""
    folder: Path
    """Folder of the policy's deployable, unquantized checkpoint."""
    scheme: str
    """Name of the scheme to quantize to."""
    layout: Layout
    """Layout of the checkpoint once it is in `scheme`."""
    calibration: tuple[tuple[int, ...], ...]
    """Token ids of each calibration sequence: a prompt and its completion or conversation."""
    canary: list[list[int]]
    """Fixed sequences, token ids."""
    logprobs: list[list[float]]
    """Log-probs of the fixed sequences by the unquantized engine, nats."""
    task: Task
    """The run's task."""
    prompter: Prompter
    """Makes prompts as the run made them."""
    defaults: RequestDefaults
    """How the run asked its policy."""


def open_source(run: RunFolder, work: Path, scheme: str, count: int) -> Source:
    """Write the run's masters into `work`, unquantized, and sample `count` calibration sequences
    from them.

    One temporary engine does the sampling and the reference log-probs. Raises `SchemeError` before
    it starts if `scheme` cannot hold a layer, and `ConfigError` for a prompt above the run's limit.
    """
    # Only the masters count, not the scheme they were sampled in, so this is a run in bf16.
    config = run.config().model_copy(
        update={
            "scheme": UNQUANTIZED,
            "layers": (),
            "quantization": QuantizationConfig(),
        }
    )
    checkpoint = load_checkpoint(run.checkpoints)
    policy = open_policy(config)
    saved = checkpoint.learner_state(policy.learner)
    policy.learner.load_state_dict(saved | {"scales": {}})
    return sample_source(policy, policy.model, config, work, scheme, count, checkpoint.step)


def sample_source(
    policy: TrainingPolicy,
    model: LowBitModel,
    config: RunConfig,
    work: Path,
    scheme: str,
    count: int,
    step: int = 0,
) -> Source:
    """Make a source of an unquantized model with the policy's task and tokenizer; see
    `open_source`.
    """
    folder = (work / "unquantized").resolve()
    export_checkpoint(model, policy.folder, folder)
    layout = checkpoint_layout(folder, scheme, config.dtype)
    canary = canary_sequences(policy, config)
    with open_engine(folder, config.rollout, config.dtype) as engine:
        logprobs = engine.logprobs(canary)
        calibration = _calibration(engine, policy, count, config)
    return Source(
        config=config,
        step=step,
        folder=folder,
        scheme=scheme,
        layout=layout,
        calibration=calibration,
        canary=canary,
        logprobs=logprobs,
        task=policy.task,
        prompter=policy.prompter,
        defaults=policy_defaults(policy, config),
    )


def _calibration(
    engine: SamplingEngine, policy: TrainingPolicy, count: int, config: RunConfig
) -> tuple[tuple[int, ...], ...]:
    """Return training prompts, each followed by a completion that the policy samples now.

    With environments or a rollout, the conversation takes the completion's place, as in training.
    """
    problems = policy.task.problems("train", 0, count, config.seed)
    prompts = [policy.prompter.prompt(problem) for problem in problems]
    speaker = None
    if prompts:
        speaker = policy.prompter.speaker(policy.task.rollout, policy.task.time_limit)
    sampling = replace(
        Sampling.of(config.rollout, stable_hash("calibration", config.seed) >> 1),
        samples=1,
    )
    prompts, answers = sample(engine, speaker, problems, prompts, sampling)
    return tuple(
        (*prompt.token_ids, *completions[0].token_ids)
        for prompt, completions in zip(prompts, answers, strict=True)
    )
