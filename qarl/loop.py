"""The training loop: the engine samples, the learner learns, the engine gets the new weights.

A step samples a batch, learns from it, and publishes the new weights as the next version. With
`rollout.max_staleness` batches are sampled ahead (`qarl.run.rollouts` says in which order). A batch
whose advantages are all zero is skipped: nothing is learned or published. Each step ends with its
record (tokens, metrics) and, if they are due, held-out evaluation and a checkpoint.
"""

from qarl.learner.batching import make_batch
from qarl.learner.stopwatch import Stopwatch
from qarl.report.dashboard import Dashboard
from qarl.report.early_warning import RunWatch
from qarl.report.loggers import SendMetrics, send_nowhere
from qarl.report.metrics import StepMetrics, WriteMetrics, batch_metrics, metrics_writer
from qarl.report.run_folder import read_metrics
from qarl.report.start_note import write_start
from qarl.report.token_recorder import TokenRecorder
from qarl.run.evaluate import evaluate_before_training, evaluate_heldout
from qarl.run.interrupt import agreed_signal, deferred_interrupt
from qarl.run.policy import describe_training
from qarl.run.rollouts import Rollouts
from qarl.run.session import Position, Session, open_session
from qarl.run.step_checkpoints import StepCheckpoints
from qarl.run.verify_export import RunOutcome, export_sampled, finish
from qarl.start import RunStart, open_run


def train(start: RunStart, dashboard: Dashboard, send: SendMetrics = send_nowhere) -> RunOutcome:
    """Train until `steps` are done or an interrupt, and return what the run ended with.

    All processes run the same loop on the same groups, of which each sampled its share. Only the
    first process writes, and sends its metrics to `send`.
    """
    config = start.config
    folder = start.folder
    policy, position, digests = open_run(start)
    with open_session(config, folder, policy, position.version > 0) as session:
        trained = [*session.describe(), *describe_training(policy, config)]
        materializers = policy.model.materializers()
        dashboard.audited(session.audited, materializers, policy.learner.scorer.packed, trained)
        published = session.publisher.publish(position.version)
        if not start.resume and config.eval.problems:
            dashboard.baseline(evaluate_before_training(session, config, position))
        if not start.resume and policy.processes.first:
            write_start(folder, session.audited, published, position.heldout_before)
        step_checkpoints = StepCheckpoints(config, folder, policy, position, digests)
        stopped_by = _run_steps(session, start, dashboard, position, step_checkpoints, send)
        reference = None if stopped_by else export_sampled(session, config, folder, position.step)
    return finish(policy, config, folder, position, reference, stopped_by)


def _run_steps(
    session: Session,
    start: RunStart,
    dashboard: Dashboard,
    position: Position,
    step_checkpoints: StepCheckpoints,
    send: SendMetrics,
) -> int | None:
    """Do the steps that are left, and write metrics and a checkpoint after each if due.

    Returns the number of the signal that stopped the run, or None.
    """
    config = start.config
    folder = start.folder
    processes = start.processes
    resume_step = position.step if start.resume else None
    rollouts = Rollouts(session, config, position, Stopwatch(dashboard.entered))
    tokenizer = session.policy.prompter.tokenizer
    recorder = TokenRecorder(folder.tokens, config.record, tokenizer, resume_step, processes.first)
    run_watch = RunWatch(
        read_metrics(folder.metrics, position.step),
        stops=config.early_warning == "stop",
        last_step=config.steps,
    )
    with (
        step_checkpoints.checkpoint_on_error(),
        metrics_writer(folder, resume_step, processes.first, send) as write_metrics,
        deferred_interrupt() as interrupts,
    ):
        stopped_by = None
        while position.step < config.steps and stopped_by is None:
            metrics = _step(rollouts, position, recorder, write_metrics)
            dashboard.stepped(metrics, run_watch.add(metrics.flat()))
            stopped_by = agreed_signal(interrupts, processes)
            step_checkpoints.after_step(rollouts, metrics.heldout, stopping=stopped_by is not None)
        return stopped_by or agreed_signal(interrupts, processes)


def _step(
    rollouts: Rollouts, position: Position, recorder: TokenRecorder, write: WriteMetrics
) -> StepMetrics:
    """Do one step, move `position` forward, and write its metrics, also if a publish fails."""
    session = rollouts.session
    config = rollouts.config
    stopwatch = rollouts.stopwatch
    learn_stats = published = token_log = heldout = None
    all_groups, training_groups = rollouts.take()
    if training_groups:
        pad_token = session.policy.prompter.pad_token
        advantage = config.learner.advantage
        batch = make_batch(training_groups, pad_token, advantage, position.version)
        if batch.advantages.any():
            token_log = recorder.log(batch, training_groups)
            gate = session.gate if position.version == 0 else None  # before the first update
            with stopwatch("learn"):
                learn_stats = session.policy.learner.learn(batch, position.step, gate, token_log)
    if learn_stats is None:
        position.skipped_batches += 1
    else:
        position.version += 1
    position.step += 1  # the weights include it, so a checkpoint after a failure counts it
    try:
        rollouts.finish_pending()
        with stopwatch("record"):
            recorder.write(position.step, training_groups if learn_stats else all_groups, token_log)
        if learn_stats is not None:
            with stopwatch("publish"):
                published = session.publisher.publish(position.version)
        last = position.step == config.steps
        if config.eval.problems and (position.step % config.eval.every == 0 or last):
            with stopwatch("evaluate"):
                heldout = evaluate_heldout(session, config)
    finally:
        metrics = StepMetrics(
            step=position.step,
            weight_version=position.version,
            skipped_batches=position.skipped_batches,
            learn=learn_stats,
            heldout=heldout,
            digest=None if published is None else published.digest,
            canary=None if published is None else published.canary_mean_abs,
            seconds=stopwatch.take(),
            staleness=rollouts.staleness,
            **batch_metrics(all_groups),
        )
        write(metrics)
    return metrics
