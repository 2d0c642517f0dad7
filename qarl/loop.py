"""The loop: generate → score → advantages → learn → publish → log / checkpoint."""

from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import heldout
from qarl.learner.batching import make_batch
from qarl.learner.processes import Processes
from qarl.learner.stopwatch import Stopwatch
from qarl.ptq.export import initial_codes
from qarl.quant.model.kept_scales import start_from_codes
from qarl.report.dashboard import Dashboard
from qarl.report.early_warning import RunWatch
from qarl.report.loggers import Log, unlogged
from qarl.report.metrics import StepMetrics, batch_metrics, metrics_writer, read_until
from qarl.report.run_folder import RunFolder
from qarl.report.start_note import write_start
from qarl.report.startup import phase, say
from qarl.report.token_recorder import TokenRecorder
from qarl.run.checkpoint import load_checkpoint
from qarl.run.evaluate import heldout_at_first, heldout_of
from qarl.run.interrupt import deferred_interrupt
from qarl.run.policy import open_policy, trained_part
from qarl.run.rollouts import Rollouts
from qarl.run.session import Position, open_session
from qarl.run.step_checkpoints import StepCheckpoints
from qarl.run.verify_export import Outcome, export_sampled, finish
from qarl.tasks import Task


def train(
    config: RunConfig,
    folder: RunFolder,
    dashboard: Dashboard,
    processes: Processes,
    resume: bool = False,
    log: Log = unlogged,
    task: Task | None = None,
) -> Outcome:
    """Run until `config.steps` or an interrupt; returns what the run ended with. All processes run
    the same loop on the same groups, of which each sampled its share; the first alone writes, also
    to `log`. task: of `config`, loaded.
    """
    with phase("loading the model"):
        policy, at = open_policy(config, processes, task), Position()
    if resume:
        _, state = load_checkpoint(folder.checkpoints, processes, step_over=say)
        policy.learner.load_state_dict(state["learner"])
        at = Position(**state["position"])
    elif config.quantization.init is not None:
        with phase(f"calibrating codes by {config.quantization.init}"):
            start_from_codes(
                policy.model,
                initial_codes(policy, config),
                keep_masters=not config.learner.aligned,
            )
    with open_session(config, folder, policy) as session:
        trained = [*session.describe(), *trained_part(policy, config)]
        dashboard.audited(
            session.audited,
            policy.model.materializers(),
            policy.learner.scorer.packed,
            trained,
        )
        published = session.publisher.publish(at.version)
        if not resume and config.eval.problems:
            dashboard.baseline(heldout_at_first(session, config, at))
        if not resume and processes.first:
            write_start(folder, session.audited, published, at.first_accuracy, at.first_reward)
        rollouts, resume_step = (
            Rollouts(session, config, at, Stopwatch(dashboard.entered)),
            at.step if resume else None,
        )
        recorder = TokenRecorder(
            folder.tokens,
            config.record,
            policy.prompter.tokenizer,
            resume_step,
            processes.first,
        )
        signs = RunWatch(
            read_until(folder.metrics, at.step),
            config.steps if config.early_warning == "stop" else 0,
        )
        keeping = StepCheckpoints(config, folder, policy, at).last_step_kept()
        writing = metrics_writer(folder, resume_step, processes.first, log)
        with (
            keeping as checkpoints,
            writing as write,
            deferred_interrupt() as interrupted,
        ):
            stopping = False
            while at.step < config.steps and not stopping:
                metrics = _step(rollouts, at, recorder)
                write(metrics)
                dashboard.stepped(metrics, signs.add(metrics.flat()))
                stopping = processes.any(bool(interrupted))
                checkpoints.after_step(rollouts, heldout(vars(metrics)), stopping)
        sampled = export_sampled(session, config, folder, at.step)
    return finish(policy, config, folder, at, sampled)


def _step(rollouts: Rollouts, at: Position, recorder: TokenRecorder) -> StepMetrics:
    """One step of the loop; moves `at` forward."""
    session, config, watch, policy = (
        rollouts.session,
        rollouts.config,
        rollouts.watch,
        rollouts.session.policy,
    )
    sampled, groups = rollouts.take()
    batch = (
        make_batch(groups, policy.prompter.pad_token, config.learner.advantage, at.version)
        if groups
        else None
    )
    learned = published = log = None
    if batch is not None and batch.advantages.any():
        log = recorder.log(batch, groups)
        with watch("learn"):
            learned = policy.learner.learn(
                batch, at.step, session.gate if at.version == 0 else None, log
            )
    at.skipped_batches += learned is None
    at.version += learned is not None
    at.step += 1  # learned: whatever fails from here on, a checkpoint is of this step
    rollouts.finish_pending()
    if learned is not None:
        with watch("publish"):
            published = session.publisher.publish(at.version)
    with watch("record"):
        recorder.write(at.step, groups if learned else sampled, log)
    measured = None
    if config.eval.problems and (at.step % config.eval.every == 0 or at.step == config.steps):
        with watch("evaluate"):
            measured = heldout_of(session, config)
    return StepMetrics(
        step=at.step,
        weight_version=at.version,
        skipped_batches=at.skipped_batches,
        learn=learned,
        accuracy=measured and measured.accuracy,
        heldout_reward=measured and measured.reward,
        digest=published and published.digest,
        canary=published and published.canary and published.canary.mean_abs,
        seconds=watch.take(),
        staleness=rollouts.staleness,
        **batch_metrics(sampled),
    )
