"""What is quantized after training: a run's masters, unquantized, with sequences to calibrate
on.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from qarl.configs.schema.quantization import QuantizationConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import UNQUANTIZED
from qarl.configs.seeds import stable_hash
from qarl.ptq.expected_checkpoint import Layout, checkpoint_layout
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.report.run_folder import RunFolder
from qarl.rollout.engine import Engine
from qarl.rollout.open import open_engine
from qarl.rollout.types import Sampling
from qarl.run.checkpoint import load_checkpoint
from qarl.run.policy import Policy, open_policy
from qarl.run.prompts import sample
from qarl.run.session import canary_sequences
from qarl.sync.export import export_checkpoint


@dataclass(frozen=True)
class Source:
    """An unquantized policy, ready to be quantized to one scheme by several methods.

    step: of the checkpoint. folder: its deployable checkpoint, unquantized; layout: what that
    becomes in `scheme`. calibration: token ids of each sequence, a prompt and what followed.
    canary: fixed sequences; logprobs: what the unquantized engine gives them, nats.
    """

    config: RunConfig
    step: int
    folder: Path
    scheme: str
    layout: Layout
    calibration: tuple[tuple[int, ...], ...]
    canary: list[list[int]]
    logprobs: list[list[float]]


def open_source(run: RunFolder, work: Path, scheme: str, count: int) -> Source:
    """Write the run's masters into `work`, unquantized, and sample `count` calibration sequences
    from them.

    One engine, closed again, does the sampling and the reference log-probs. Raises `SchemeError`
    before it starts, where a layer cannot be held in `scheme`, and `ConfigError` for a prompt above
    the run's limit.
    """
    # As a run in bf16: of its masters alone, whatever they were sampled in.
    config = run.config().model_copy(
        update={
            "scheme": UNQUANTIZED,
            "layers": (),
            "quantization": QuantizationConfig(),
        }
    )
    step, state = load_checkpoint(run.checkpoints)
    policy = open_policy(config)
    policy.learner.load_state_dict(state["learner"] | {"scales": {}})
    return sample_source(policy, policy.model, config, work, scheme, count, step)


def sample_source(
    policy: Policy,
    model: LowBitModel,
    config: RunConfig,
    work: Path,
    scheme: str,
    count: int,
    step: int = 0,
) -> Source:
    """As `open_source`, of an unquantized model of the policy's."""
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
    )


def _calibration(
    engine: Engine, policy: Policy, count: int, config: RunConfig
) -> tuple[tuple[int, ...], ...]:
    """Each prompt followed by one completion the policy samples now, or its whole conversation, as
    in training.
    """
    problems = policy.task.problems("train", 0, count, config.seed)
    prompts = [policy.prompter.prompt(problem) for problem in problems]
    speaker = (
        policy.prompter.speaker(policy.task.rollout, policy.task.time_limit) if prompts else None
    )
    sampling = replace(
        Sampling.of(config.rollout, stable_hash("calibration", config.seed) >> 1),
        samples=1,
    )
    begun, answers = sample(engine, speaker, problems, prompts, sampling)
    return tuple((*p.token_ids, *a[0].token_ids) for p, a in zip(begun, answers, strict=True))
