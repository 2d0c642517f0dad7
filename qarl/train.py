"""The loop: generate → score → advantages → learn → publish → log / checkpoint."""

from learner.batching import make_batch
from learner.optim import lr_factor
from qarl.checkpoint import load_checkpoint, save_checkpoint
from qarl.config import RunConfig
from qarl.evaluate import heldout_accuracy
from qarl.finish import Outcome, finish
from qarl.interrupt import deferred_interrupt
from qarl.metrics import MetricsWriter, StepMetrics, Stopwatch, batch_metrics
from qarl.progress import Dashboard
from qarl.prompts import score_groups
from qarl.run_folder import RunFolder
from qarl.session import Position, Session, open_policy, open_session
from qarl.tasks.base import stable_hash
from rollout.types import Group, Sampling


def train(config: RunConfig, folder: RunFolder, dashboard: Dashboard, resume: bool = False) -> Outcome:
    """Run until `config.steps` or an interrupt; returns what the run ended with."""
    policy, at = open_policy(config), Position()
    if resume:
        _, state = load_checkpoint(folder.checkpoints)
        policy.learner.load_state_dict(state["learner"])
        at = Position(**state["position"])
    session = open_session(config, folder, policy)
    dashboard.audited(session.audited, policy.model.materializers())
    session.publisher.publish(at.version)
    writer = MetricsWriter(folder, at.step if resume else None)
    if at.first_accuracy is None and config.eval.problems:
        at.first_accuracy = _accuracy(session, config)
        dashboard.baseline(at.first_accuracy)
    with deferred_interrupt() as interrupted:
        while at.step < config.steps and not interrupted:
            metrics, groups = _step(session, config, at)
            writer.write(metrics, groups)
            dashboard.stepped(metrics)
            if at.step % config.checkpoint.every == 0 or at.step == config.steps or interrupted:
                state = {"learner": policy.learner.state_dict(), "position": vars(at)}
                save_checkpoint(folder.checkpoints, at.step, state, config.checkpoint.keep)
    writer.close()
    return finish(session, config, folder, at.step, at.first_accuracy)


def _step(session: Session, config: RunConfig, at: Position) -> tuple[StepMetrics, list[Group]]:
    """One step of the loop; moves `at` forward."""
    policy, watch, count = session.policy, Stopwatch(), config.rollout.prompts
    with watch("sample"):
        problems = policy.task.problems("train", at.step * count, count, config.seed)
        prompts = [policy.prompter.prompt(problem) for problem in problems]
        seed = stable_hash("step", config.seed, at.step) >> 1
        sampling = Sampling(config.rollout.samples, config.rollout.max_new_tokens, seed=seed)
        completions = session.engine.generate(prompts, sampling)
    with watch("score"):
        groups = score_groups(policy.task, problems, prompts, completions)
        batch = make_batch(groups, policy.prompter.pad_token)
    learned = published = None
    if batch.advantages.any():
        with watch("learn"):
            optimizer = config.learner.optimizer
            factor = lr_factor(at.step, config.steps, optimizer.warmup_steps, optimizer.decay_steps)
            gate = session.gate if at.version == 0 else None
            learned = policy.learner.learn(batch, seed, gate, factor)
        with watch("publish"):
            published = session.publisher.publish(at.version + 1)
        at.version += 1
    at.skipped_batches += learned is None
    at.step += 1
    accuracy = None
    if config.eval.problems and (at.step % config.eval.every == 0 or at.step == config.steps):
        with watch("evaluate"):
            accuracy = _accuracy(session, config)
    metrics = StepMetrics(
        step=at.step, weight_version=at.version, skipped_batches=at.skipped_batches, learn=learned, accuracy=accuracy,
        digest=published and published.digest, seconds=watch.seconds, **batch_metrics(groups),
    )  # fmt: skip
    return metrics, groups


def _accuracy(session: Session, config: RunConfig) -> float:
    policy, longest = session.policy, config.rollout.max_new_tokens
    return heldout_accuracy(session.engine, policy.task, policy.prompter, config.eval.problems, longest)
