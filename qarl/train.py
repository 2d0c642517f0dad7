"""The loop: generate → score → advantages → learn → publish → log / checkpoint."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from learner.batching import make_batch
from qarl.checkpoint import load_checkpoint, save_checkpoint
from qarl.config import RunConfig
from qarl.evaluate import heldout_accuracy
from qarl.finish import Outcome, finish
from qarl.metrics import MetricsWriter, StepMetrics, Stopwatch, batch_metrics
from qarl.progress import Dashboard
from qarl.prompts import score_groups
from qarl.run_folder import RunFolder
from qarl.session import Session, open_policy, open_session
from qarl.tasks.base import stable_hash
from rollout.types import Sampling
from sync.gate import require_same_policy


@dataclass
class Progress:
    """Where a run stands: what a checkpoint holds besides the learner. version: of the weights in the engine."""

    step: int = 0
    version: int = 0
    skipped_batches: int = 0
    first_accuracy: float | None = None


def train(config: RunConfig, folder: RunFolder, dashboard: Dashboard, resume: bool = False) -> Outcome:
    """Run until `config.steps` or an interrupt; returns what the run ended with."""
    policy = open_policy(config)
    at = Progress()
    if resume:
        _, state = load_checkpoint(folder.checkpoints)
        policy.learner.load_state_dict(state["learner"])
        at = Progress(**state["progress"])
    session = open_session(config, folder, policy)
    dashboard.audited(session.audited)
    session.publisher.publish(at.version)
    board = folder.path / "tensorboard"
    writer = MetricsWriter(folder.metrics, folder.samples, board, at.step if resume else None)
    if at.first_accuracy is None and config.eval.problems:
        at.first_accuracy = _accuracy(session, config)
        dashboard.baseline(at.first_accuracy)
    with _interrupt_flag() as interrupted:
        while at.step < config.steps and not interrupted:
            writer.write(*_step(session, config, at, dashboard))
            if at.step % config.checkpoint.every == 0 or at.step == config.steps or interrupted:
                _save(session, config, folder, at)
    writer.close()
    return finish(session, config, folder, at.step, at.first_accuracy)


def _step(session: Session, config: RunConfig, at: Progress, dashboard: Dashboard):
    """One step of the loop; moves `at` forward and returns the step's metrics and groups."""
    policy, watch = session.policy, Stopwatch()
    with watch("sample"):
        problems = policy.task.problems("train", at.step * config.rollout.prompts, config.rollout.prompts, config.seed)
        prompts = [policy.prompter.prompt(problem) for problem in problems]
        seed = stable_hash("step", config.seed, at.step) >> 1
        sampling = Sampling(config.rollout.samples, config.rollout.max_new_tokens, seed=seed)
        completions = session.engine.generate(prompts, sampling)
    with watch("score"):
        groups = score_groups(policy.task, problems, prompts, completions)
        batch = make_batch(groups, policy.prompter.pad_token)
    learned = publish = None
    if batch.advantages.any():
        with watch("learn"):
            gate = _gate(config, session) if at.version == 0 and config.learner.aligned else None
            learned = policy.learner.learn(batch, seed, gate)
        with watch("publish"):
            publish = session.publisher.publish(at.version + 1)
        at.version += 1
    at.skipped_batches += learned is None
    at.step += 1
    accuracy = None
    if config.eval.problems and (at.step % config.eval.every == 0 or at.step == config.steps):
        with watch("evaluate"):
            accuracy = _accuracy(session, config)
    metrics = StepMetrics(
        step=at.step, weight_version=at.version, skipped_batches=at.skipped_batches, learn=learned, accuracy=accuracy,
        digest=publish and publish.digest, seconds=watch.seconds, **batch_metrics(groups),
    )  # fmt: skip
    dashboard.stepped(metrics)
    return metrics, groups


def _gate(config: RunConfig, session: Session):
    scheme = session.policy.model.scheme
    bound, k3_bound = config.sync.gate_bound or scheme.bound, config.sync.gate_k3_bound or scheme.k3_bound
    return lambda mismatch: require_same_policy(mismatch, bound, k3_bound)


def _accuracy(session: Session, config: RunConfig) -> float:
    policy, r = session.policy, config.rollout
    return heldout_accuracy(session.engine, policy.task, policy.prompter, config.eval.problems, r.max_new_tokens)


def _save(session: Session, config: RunConfig, folder: RunFolder, at: Progress) -> None:
    state = {"learner": session.policy.learner.state_dict(), "progress": vars(at)}
    save_checkpoint(folder.checkpoints, at.step, state, config.checkpoint.keep)


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """A list that a first Ctrl-C makes non-empty (the step in hand is finished); a second one interrupts at once."""
    flag: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        flag.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
