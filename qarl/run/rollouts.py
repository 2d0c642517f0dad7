"""A run's batches in order, each sampled when it is asked for, or up to `rollout.max_staleness`
steps ahead of that.

    0          batch k is sampled by the weights that learn from it 1          batch k + 1 is begun,
    then batch k is learned, then batch k + 1 comes in, then the weights that were
               learned are published
    S from 2   batches up to k + S are begun, then batch k is learned, then its weights are
    published, by which what is
               under way goes on

So with 1 no request is under way at a publish, and every batch is of one weight version, the one
before those that learn from it, however fast anything is: equal runs are as equal as they are with
0. From 2 on a completion may be of several versions, none more than S before those that learn from
it, and which token is of which is a matter of time.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from qarl.configs.schema.run import RunConfig
from qarl.configs.seeds import step_seed
from qarl.learner.stopwatch import Stopwatch
from qarl.report.run_folder import RunFolder
from qarl.report.token_files import read_groups, step_files
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.run.prompts import Sampled, Speaker, sample, score_groups
from qarl.run.session import Position, Session
from qarl.tasks import Problem, RewardError
from qarl.tasks.base import WeightedSum

Batch = tuple[list[Group], list[Group]]
"""As `sample_step` gives it: all groups, and those to learn from."""


class Rollouts:
    """A session's batches, from where a run stands. watch: of the run's steps; what a checkpoint
    waits for is the next one's. staleness: versions between the weights that sampled the batch
    taken last and those it found, in the mean over tokens; None where none is sampled ahead.
    """

    def __init__(self, session: Session, config: RunConfig, at: Position, watch: Stopwatch):
        self.session = session
        self.watch = watch
        self.staleness: float | None = None
        self.config = config
        self._at = at
        self._ahead = 0 if config.from_rollouts is not None else config.rollout.max_staleness
        self._threads = ThreadPoolExecutor(max(1, self._ahead), "sampling-ahead")
        self._ready = deque(map(_batch, at.ahead))
        # by steps, those after `_ready`
        self._begun: deque[tuple[int, Future[Sampled]]] = deque()
        self._next = at.step + len(self._ready)

    def take(self) -> Batch:
        """The batch of the step to be done; those after it are begun, where they are sampled
        ahead.
        """
        self._next = max(self._next, self._at.step + 1)
        if self._ready:
            # still in `ahead`, of whose step a late fault writes a checkpoint
            batch = self._ready.popleft()
        elif self._begun:
            batch = self._next_pending()
        else:
            batch = sample_step(self.session, self.config, self._at.step, self.watch)
        if self._ahead:
            versions = [
                v
                for group in batch[0]
                for completion in group.completions
                for v in completion.versions
            ]
            self.staleness = self._at.version - sum(versions) / len(versions)
            with self.watch("sample"):
                self._begin()
        return batch

    def finish_pending(self) -> None:
        """Keep what was not taken. With staleness 1, wait for the request in flight: a publish must
        not overlap it.
        """
        self._at.ahead = self._at.ahead[len(self._at.ahead) - len(self._ready) :]
        if self._ahead == 1:
            self._collect_pending()

    def position(self) -> dict[str, Any]:
        """Where the run stands, for a checkpoint. What was begun is waited for and in it: weights
        that are replaced cannot sample it again.
        """
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
            # A thread waits for servers and does nothing else: what processes do together is the
            # main one's.
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
        "sampled": [
            {**asdict(group), "rewards": [float(reward) for reward in group.rewards]}
            for group in sampled
        ],
        "terms": [
            [getattr(reward, "terms", None) for reward in group.rewards] for group in sampled
        ],
        "to_learn_from": [place[id(group)] for group in to_learn_from],
    }


def _batch(plain: dict[str, Any]) -> Batch:
    """The inverse of `_plain`."""
    sampled = TypeAdapter(list[Group]).validate_python(plain["sampled"])
    for number, terms in enumerate(plain["terms"]):
        rewards = (
            WeightedSum(r, t) if t else r
            for r, t in zip(sampled[number].rewards, terms, strict=True)
        )
        sampled[number] = replace(sampled[number], rewards=tuple(rewards))
    return sampled, [sampled[number] for number in plain["to_learn_from"]]


@dataclass(frozen=True)
class SampleRequest:
    """What this process asks the engine in a round of a step: prompts, stating the problems one by
    one.
    """

    problems: list[Problem]
    prompts: list[Prompt]
    sampling: Sampling
    speaker: Speaker | None

    def answered(self, session: Session) -> Sampled:
        """What the session's engine answers."""
        return sample(session.engine, self.speaker, self.problems, self.prompts, self.sampling)


def sample_step(
    session: Session,
    config: RunConfig,
    step: int,
    watch: Stopwatch,
    first: Callable[[], Sampled] | None = None,
) -> tuple[list[Group], list[Group]]:
    """All groups sampled in `step`, and those to learn from. first: what the engine, asked already,
    answers in the step's first round; None asks it now.

    With `rollout.dynamic_sampling` (DAPO, arXiv 2503.14476, section 3.2) groups whose rewards are
    all equal are dropped and rounds repeated, within its bound, until `rollout.prompts` groups are
    left; there may be fewer, or none.

    With `from_rollouts` they are those of the recorded step; of groups that were dropped there is
    no record.

    Raises:
        RewardError: the reward gave no signal for any completion.
    """
    policy, extra, wanted = (
        session.policy,
        config.rollout.dynamic_sampling,
        config.rollout.prompts,
    )
    if config.from_rollouts is not None:
        with watch("sample"):
            recorded = read_groups(
                step_files(RunFolder(Path(config.from_rollouts)).tokens)[step + 1]
            )
        return recorded, _to_learn_from(recorded, extra)
    sampled: list[Group] = []
    kept: list[Group] = []
    for attempt in range(1 + (extra or 0)):
        with watch("sample"):
            request = make_request(session, config, step, attempt)
            prompts, completions = first() if first and attempt == 0 else request.answered(session)
        with watch("score"):  # each process its share; all get all groups
            scored = score_groups(policy.task, request.problems, prompts, completions)
            groups = policy.processes.concatenated(scored)
        sampled += groups
        kept += _to_learn_from(groups, extra)
        if len(kept) >= wanted:
            break
    if not any(group.completions for group in sampled):
        raise RewardError(
            f"the reward of task {policy.task.name!r} gave None (no signal) for all"
            f" {sum(group.unscored for group in sampled)} completions of step {step + 1}; give a"
            " number where a completion can be judged"
        )
    return sampled, kept[:wanted]


def _to_learn_from(groups: list[Group], extra: int | None) -> list[Group]:
    """extra: `rollout.dynamic_sampling`."""
    compared = [group for group in groups if len(group.completions) > 1]
    return (
        compared if extra is None else [group for group in compared if len(set(group.rewards)) > 1]
    )


def make_request(session: Session, config: RunConfig, step: int, attempt: int = 0) -> SampleRequest:
    """Problems and seeds are functions of (seed, step, attempt) alone, so a resumed run repeats
    them, in however many processes. Each asks for its share.
    """
    policy, rollout, processes = (
        session.policy,
        config.rollout,
        session.policy.processes,
    )
    start = (step * (1 + (rollout.dynamic_sampling or 0)) + attempt) * rollout.prompts
    problems = processes.share(policy.task.problems("train", start, rollout.prompts, config.seed))
    first = processes.span(rollout.prompts).start
    sampling = Sampling.of(rollout, step_seed(config.seed, step, attempt), first)
    prompts = [policy.prompter.prompt(problem) for problem in problems]
    speaker = policy.prompter.speaker(policy.task.rollout, policy.task.time_limit)
    return SampleRequest(problems=problems, prompts=prompts, sampling=sampling, speaker=speaker)
