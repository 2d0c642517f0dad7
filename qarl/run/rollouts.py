"""A run's batches in order, each sampled when it is asked for, or one step ahead of that.

    rollout.max_staleness 0    batch k is sampled by the weights that learn from it
    rollout.max_staleness 1    batch k + 1 is begun, then batch k is learned, then batch k + 1 comes in, then the
                               weights that were learned are published

So no request is under way at a publish, and every batch is of one weight version, the one before those that learn from
it, however fast anything is: equal runs are as equal as they are with 0.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from configs.schema.run import RunConfig
from learner.stopwatch import Stopwatch
from qarl.run.rollout_step import Completions, ask, sample_step
from qarl.run.session import Position, Session
from rollout.types import Completion, Group, Prompt

Batch = tuple[list[Group], list[Group]]
"""As `sample_step` gives it: all groups, and those to learn from."""


class Rollouts:
    """A session's batches, from where a run stands. staleness: versions between the weights that sampled the batch
    taken last and those it found, in the mean over completions; None where none is sampled ahead."""

    def __init__(self, session: Session, config: RunConfig, at: Position):
        self.session = session
        self.staleness: float | None = None
        self.config = config
        self._at = at
        self._ahead = config.rollout.max_staleness > 0 and config.from_rollouts is None
        self._thread = ThreadPoolExecutor(1, "sampling-ahead")
        self._begun: Future[Completions] | None = None
        self._ready = None if at.ahead is None else _batch(at.ahead)

    def take(self, watch: Stopwatch) -> Batch:
        """The batch of the step to be done; the next one is begun, where they are sampled ahead."""
        step, ready = self._at.step, self._ready
        batch = ready or sample_step(self.session, self.config, step, watch)
        self._ready = self._at.ahead = None
        if self._ahead:
            versions = [completion.weight_version for group in batch[0] for completion in group.completions]
            self.staleness = self._at.version - sum(versions) / len(versions)
            with watch("sample"):
                self._begin(step + 1)
        return batch

    def _begin(self, step: int) -> None:
        if step < self.config.steps:
            asked = ask(self.session, self.config, step)
            # The thread waits for servers and does nothing else: what processes do together is the main one's.
            self._begun = self._thread.submit(self.session.engine.generate, asked.prompts, asked.sampling)

    def settle(self, watch: Stopwatch) -> None:
        """Have the batch that was begun, and put it where a checkpoint finds it: weights that are replaced now cannot
        sample it again."""
        if self._begun is not None:
            answer, self._begun = self._begun, None
            self._ready = sample_step(self.session, self.config, self._at.step + 1, watch, answer.result)
            self._at.ahead = _plain(self._ready)


def _plain(batch: Batch) -> dict[str, Any]:
    sampled, to_learn_from = batch
    place = {id(group): number for number, group in enumerate(sampled)}
    return {
        "sampled": [
            {**vars(group), "prompt": vars(group.prompt), "completions": [vars(each) for each in group.completions]}
            for group in sampled
        ],
        "to_learn_from": [place[id(group)] for group in to_learn_from],
    }


def _batch(plain: dict[str, Any]) -> Batch:
    """The inverse of `_plain`."""
    sampled = [
        Group(
            prompt=Prompt(**group["prompt"]),
            completions=tuple(Completion(**each) for each in group["completions"]),
            rewards=group["rewards"],
            unscored=group["unscored"],
        )
        for group in plain["sampled"]
    ]
    return sampled, [sampled[number] for number in plain["to_learn_from"]]
