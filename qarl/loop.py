"""The training loop: the engine samples, the learner learns, the engine gets the new weights.

Step k with staleness S (`rollout.max_staleness`; `qarl.run.rollouts` samples ahead, on servers):

    S = 0   sample batch k; learn from it; publish the new weights as the next version
    S = 1   begin batch k + 1; learn from batch k; wait for batch k + 1; publish
    S >= 2  begin batches up to k + S; learn from batch k; publish while requests are in flight

So the weights that learn from a batch are at most S versions newer than those that sampled it. A
batch whose advantages are all zero is skipped: nothing is learned or published. Each step ends with
its record (tokens, metrics) and, if they are due, held-out evaluation and a checkpoint.
"""

from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import heldout
from qarl.learner.batching import make_batch
from qarl.learner.processes import Processes
from qarl.learner.stopwatch import Stopwatch
from qarl.report.dashboard import Dashboard
from qarl.report.early_warning import RunWatch
from qarl.report.loggers import Log, unlogged
from qarl.report.metrics import StepMetrics, WriteMetrics, batch_metrics, metrics_writer, read_until
from qarl.report.run_folder import RunFolder
from qarl.report.start_note import write_start
from qarl.report.token_recorder import TokenRecorder
from qarl.run.evaluate import evaluate_before_training, evaluate_heldout
from qarl.run.interrupt import agreed_signal, deferred_interrupt
from qarl.run.policy import CheckedInputs, trained_part
from qarl.run.rollouts import Rollouts
from qarl.run.session import Position, Session, open_session
from qarl.run.step_checkpoints import StepCheckpoints
from qarl.run.verify_export import RunOutcome, export_sampled, finish
from qarl.start import open_run


def train(
    config: RunConfig,
    folder: RunFolder,
    dashboard: Dashboard,
    processes: Processes,
    resume: bool = False,
    log: Log = unlogged,
    ready: CheckedInputs | None = None,
    allow_changed_inputs: bool = False,
) -> RunOutcome:
    """Train until `config.steps` or an interrupt, and return what the run ended with.

    All processes run the same loop on the same groups, of which each sampled its share. Only the
    first process writes, also to `log`. ready: what the run's checks returned.
    allow_changed_inputs: resume with other questions, functions or model, else refused.
    """
    policy, position, inputs = open_run(
        config, folder, processes, resume, ready, allow_changed_inputs
    )
    with open_session(config, folder, policy) as session:
        trained = [*session.describe(), *trained_part(policy, config)]
        materializers = policy.model.materializers()
        dashboard.audited(session.audited, materializers, policy.learner.scorer.packed, trained)
        published = session.publisher.publish(position.version)
        if not resume and config.eval.problems:
            dashboard.baseline(evaluate_before_training(session, config, position))
        if not resume and processes.first:
            before = position.first_accuracy, position.first_reward
            write_start(folder, session.audited, published, *before)
        step_checkpoints = StepCheckpoints(config, folder, policy, position, inputs)
        stopped_by = _run_steps(
            session, config, folder, dashboard, position, step_checkpoints, resume, log
        )
        sampled = None if stopped_by else export_sampled(session, config, folder, position.step)
    return finish(policy, config, folder, position, sampled, stopped_by)


def _run_steps(
    session: Session,
    config: RunConfig,
    folder: RunFolder,
    dashboard: Dashboard,
    position: Position,
    step_checkpoints: StepCheckpoints,
    resume: bool,
    log: Log,
) -> int | None:
    """Do the steps that are left, and write metrics and a checkpoint after each if due. Returns the
    signal that stopped the run, or None.
    """
    policy = session.policy
    first_process = policy.processes.first
    resume_step = position.step if resume else None
    rollouts = Rollouts(session, config, position, Stopwatch(dashboard.entered))
    tokenizer = policy.prompter.tokenizer
    recorder = TokenRecorder(folder.tokens, config.record, tokenizer, resume_step, first_process)
    stop_before = config.steps if config.early_warning == "stop" else 0
    run_watch = RunWatch(read_until(folder.metrics, position.step), stop_before)
    with (
        step_checkpoints.checkpoint_on_error(),
        metrics_writer(folder, resume_step, first_process, log) as write_metrics,
        deferred_interrupt() as interrupts,
    ):
        stopped_by = None
        while position.step < config.steps and stopped_by is None:
            metrics = _step(rollouts, position, recorder, write_metrics)
            dashboard.stepped(metrics, run_watch.add(metrics.flat()))
            stopped_by = agreed_signal(interrupts, policy.processes)
            measured = heldout(vars(metrics))
            step_checkpoints.after_step(rollouts, measured, stopping=stopped_by is not None)
        return stopped_by or agreed_signal(interrupts, policy.processes)


def _step(
    rollouts: Rollouts, position: Position, recorder: TokenRecorder, write: WriteMetrics
) -> StepMetrics:
    """Do one step, move `position` forward, and write its metrics, also if a publish fails."""
    session = rollouts.session
    config = rollouts.config
    watch = rollouts.watch
    sampled, groups = rollouts.take()
    batch = learned = published = log = measured = None
    if groups:
        pad_token = session.policy.prompter.pad_token
        batch = make_batch(groups, pad_token, config.learner.advantage, position.version)
    if batch is not None and batch.advantages.any():
        log = recorder.log(batch, groups)
        gate = session.gate if position.version == 0 else None
        with watch("learn"):
            learned = session.policy.learner.learn(batch, position.step, gate, log)
    position.skipped_batches += learned is None
    position.version += learned is not None
    position.step += 1  # the weights include it, so a checkpoint after a failure counts it

    def metrics() -> StepMetrics:
        return StepMetrics(
            step=position.step,
            weight_version=position.version,
            skipped_batches=position.skipped_batches,
            learn=learned,
            accuracy=measured and measured.accuracy,
            heldout_reward=measured and measured.reward,
            digest=published and published.digest,
            canary=published and published.canary and published.canary.mean_abs,
            seconds=watch.take(),
            staleness=rollouts.staleness,
            **batch_metrics(sampled),
        )

    try:
        rollouts.finish_pending()
        with watch("record"):
            recorder.write(position.step, groups if learned else sampled, log)
        if learned is not None:
            with watch("publish"):
                published = session.publisher.publish(position.version)
        last = position.step == config.steps
        if config.eval.problems and (position.step % config.eval.every == 0 or last):
            with watch("evaluate"):
                measured = evaluate_heldout(session, config)
    finally:
        write(written := metrics())
    return written
