"""Checkpoints of a run's steps: those that are due, the last before a failure, and the best."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import Heldout, heldout
from qarl.report.early_warning import EarlyWarningError
from qarl.report.run_folder import RunFolder, read_metrics
from qarl.report.startup import say
from qarl.run.checkpoint import CheckpointError, save_checkpoint
from qarl.run.inputs import InputDigests
from qarl.run.policy import TrainingPolicy
from qarl.run.rollouts import Rollouts
from qarl.run.session import Position
from qarl.run.verify_export import export_policy


class StepCheckpoints:
    """Writes a run's checkpoints.

    position: that of the run, which the loop moves forward. digests: those of the run's inputs
    (`qarl.run.inputs`).
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        policy: TrainingPolicy,
        position: Position,
        digests: InputDigests | None = None,
    ):
        self._digests = digests
        self._config = config
        self._folder = folder
        self._policy = policy
        self._position = position
        earlier = map(heldout, read_metrics(folder.metrics, position.step))
        measured = [position.heldout_before, *earlier]
        self._best = max((each.score for each in measured if each), default=-math.inf)

    def after_step(self, rollouts: Rollouts, measured: Heldout | None, stopping: bool) -> None:
        """Write a checkpoint if it is due, and a deployable one if held-out answers are the best.

        A checkpoint is due every `checkpoint.every` steps, after the last step and if the run
        stops. The deployable one needs `checkpoint.best`. Raises `CheckpointError` or `ExportError`
        if the disk refuses.
        """
        step = self._position.step
        if self._config.checkpoint.best and measured is not None and measured.score > self._best:
            self._best = measured.score
            best = self._folder.export.with_name("export-best")
            figures = {"heldout_accuracy": measured.accuracy, "heldout_reward": measured.reward}
            export_policy(self._policy, self._config, self._folder, step, best, **figures)
        if step % self._config.checkpoint.every == 0 or step == self._config.steps or stopping:
            self._write(rollouts.position_for_checkpoint())

    def _write(self, position: dict[str, Any]) -> None:
        state = {"learner": self._policy.learner.state_dict(), "position": position}
        save_checkpoint(
            self._folder.checkpoints,
            self._position.step,
            state,
            self._config.checkpoint.keep,
            self._policy.processes,
            self._digests,
        )

    @contextmanager
    def checkpoint_on_error(self) -> Iterator[Self]:
        """If an error of reward, engine, logger or task ends the block, write a checkpoint of the
        last step that was learned from, and raise the error again.

        An early warning is no such error: the newest checkpoint stays that of before the sign.
        Nothing is written if a batch was learned from in part, nor by several processes, because
        some of them may not have met the error. A resumed run samples pending batches again.
        """
        try:
            yield self
        except (CheckpointError, EarlyWarningError):
            raise
        except Exception:
            step = self._position.step
            learner = self._policy.learner
            if (
                learner.processes.world == 1
                and learner.batch_complete
                and step
                and self._folder.steps()[-1:] != [step]
            ):
                try:
                    self._write(vars(self._position))
                except CheckpointError as error:
                    say(str(error))
            raise
