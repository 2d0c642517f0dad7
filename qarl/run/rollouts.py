"""A run's batches in order, each sampled when it is asked for, or up to `rollout.max_staleness` steps ahead of that.

    0          batch k is sampled by the weights that learn from it
    1          batch k + 1 is begun, then batch k is learned, then batch k + 1 comes in, then the weights that were
               learned are published
    S from 2   batches up to k + S are begun, then batch k is learned, then its weights are published, by which what is
               under way goes on

So with 1 no request is under way at a publish, and every batch is of one weight version, the one before those that
learn from it, however fast anything is: equal runs are as equal as they are with 0. From 2 on a completion may be of
several versions, none more than S before those that learn from it, and which token is of which is a matter of time.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from qarl.configs.schema.run import RunConfig
from qarl.learner.stopwatch import Stopwatch
from qarl.rollout.types import Group
from qarl.run.prompts import Sampled
from qarl.run.rollout_step import make_request, sample_step
from qarl.run.session import Position, Session

Batch = tuple[list[Group], list[Group]]
"""As `sample_step` gives it: all groups, and those to learn from."""


class Rollouts:
    """A session's batches, from where a run stands. watch: of the run's steps; what a checkpoint waits for is the next
    one's. staleness: versions between the weights that sampled the batch taken last and those it found, in the mean
    over tokens; None where none is sampled ahead."""

    def __init__(self, session: Session, config: RunConfig, at: Position, watch: Stopwatch):
        self.session = session
        self.watch = watch
        self.staleness: float | None = None
        self.config = config
        self._at = at
        self._ahead = 0 if config.from_rollouts is not None else config.rollout.max_staleness
        self._threads = ThreadPoolExecutor(max(1, self._ahead), "sampling-ahead")
        self._ready = deque(map(_batch, at.ahead))
        self._begun: deque[tuple[int, Future[Sampled]]] = deque()  # by steps, those after `_ready`
        self._next = at.step + len(self._ready)

    def take(self) -> Batch:
        """The batch of the step to be done; those after it are begun, where they are sampled ahead."""
        self._next = max(self._next, self._at.step + 1)
        if self._ready:
            batch, self._at.ahead = self._ready.popleft(), self._at.ahead[1:]
        elif self._begun:
            batch = self._next_pending()
        else:
            batch = sample_step(self.session, self.config, self._at.step, self.watch)
        if self._ahead:
            versions = [v for group in batch[0] for completion in group.completions for v in completion.versions]
            self.staleness = self._at.version - sum(versions) / len(versions)
            with self.watch("sample"):
                self._begin()
        return batch

    def finish_pending(self) -> None:
        """With staleness 1, wait for the request in flight: a publish must not overlap it."""
        if self._ahead == 1:
            self._collect_pending()

    def position(self) -> dict[str, Any]:
        """Where the run stands, for a checkpoint. What was begun is waited for and in it: weights that are replaced
        cannot sample it again."""
        self._collect_pending()
        return vars(self._at)

    def _collect_pending(self) -> None:
        while self._begun:
            batch = self._next_pending()
            self._ready.append(batch)
            self._at.ahead = [*self._at.ahead, _plain(batch)]

    def _begin(self) -> None:
        while self._next <= self._at.step + self._ahead and self._next < self.config.steps:
            request = make_request(self.session, self.config, self._next)
            # A thread waits for servers and does nothing else: what processes do together is the main one's.
            answer = self._threads.submit(request.answered, self.session)
            self._begun.append((self._next, answer))
            self._next += 1

    def _next_pending(self) -> Batch:
        step, answer = self._begun.popleft()
        return sample_step(self.session, self.config, step, self.watch, answer.result)


def _plain(batch: Batch) -> dict[str, Any]:
    sampled, to_learn_from = batch
    place = {id(group): number for number, group in enumerate(sampled)}
    return {
        "sampled": [asdict(group) for group in sampled],
        "to_learn_from": [place[id(group)] for group in to_learn_from],
    }


def _batch(plain: dict[str, Any]) -> Batch:
    """The inverse of `_plain`."""
    sampled = TypeAdapter(list[Group]).validate_python(plain["sampled"])
    return sampled, [sampled[number] for number in plain["to_learn_from"]]
