"""Checkpoints of a run's steps: those that are due, one of what was learned before the run failed,
and the best.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from qarl.configs.schema.run import RunConfig
from qarl.evaluation.heldout import Heldout, heldout
from qarl.report.metrics import read_until
from qarl.report.run_folder import RunFolder
from qarl.report.startup import say
from qarl.run.checkpoint import CheckpointError, save_checkpoint
from qarl.run.policy import Policy
from qarl.run.rollouts import Rollouts
from qarl.run.session import Position
from qarl.run.verify_export import write_export


class StepCheckpoints:
    """What a run writes to be resumed from. at: where it stands, moved forward by its loop."""

    def __init__(self, config: RunConfig, folder: RunFolder, policy: Policy, at: Position):
        self._config, self._folder, self._policy, self._at = config, folder, policy, at
        first = heldout({"accuracy": at.first_accuracy, "heldout_reward": at.first_reward})
        measured = [first, *map(heldout, read_until(folder.metrics, at.step))]
        self._best = max((each.score for each in measured if each), default=-math.inf)

    def after_step(self, rollouts: Rollouts, measured: Heldout | None, stopping: bool) -> None:
        """Write one where it is due: every so many steps, of the last, and where the run stops; and
        with `checkpoint.best`, where held-out answers are the best so far, a deployable one. Raises
        `CheckpointError` or `ExportError` where the disk refuses.
        """
        if self._config.checkpoint.best and measured is not None and measured.score > self._best:
            self._best, best = (
                measured.score,
                self._folder.export.with_name("export-best"),
            )
            figures = {
                "heldout_accuracy": measured.accuracy,
                "heldout_reward": measured.reward,
            }
            write_export(self._policy, self._config, self._folder, self._at.step, best, **figures)
        if (
            self._at.step % self._config.checkpoint.every == 0
            or self._at.step == self._config.steps
            or stopping
        ):
            self._write(rollouts.position())

    def _write(self, position: dict[str, Any]) -> None:
        state = {"learner": self._policy.learner.state_dict(), "position": position}
        save_checkpoint(
            self._folder.checkpoints,
            self._at.step,
            state,
            self._config.checkpoint.keep,
            self._policy.processes,
        )

    @contextmanager
    def last_step_kept(self) -> Iterator[Self]:
        """Where what is done within ends by an error of reward, engine, logger or task, write one
        of the last step that was learned from; the error goes on.

        Nothing is written of a batch that was learned from in part, nor by several processes, which
        may not all have come to the error. What was being sampled will be sampled again.
        """
        try:
            yield self
        except CheckpointError:
            raise
        except Exception:
            step, learner = self._at.step, self._policy.learner
            if (
                learner.processes.world == 1
                and learner.whole
                and step
                and self._folder.steps()[-1:] != [step]
            ):
                try:
                    self._write(vars(self._at))
                except CheckpointError as error:
                    say(str(error))
            raise
