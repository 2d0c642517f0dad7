"""A run's batches in order, each sampled on demand or up to `rollout.max_staleness` steps ahead:

    0          batch k is sampled by the weights that learn from it
    1          batch k + 1 is begun; batch k is learned; batch k + 1 comes in; then the learned
               weights are published
    S >= 2     batches up to k + S are begun; batch k is learned; then its weights are published,
               and requests in flight continue with them

With staleness 1 no request is in flight at a publish. Every batch is of one weight version, the one
before the weights that learn from it, whatever the timing: equal runs are as equal as they are with
staleness 0. From staleness 2 on, a completion may be of several versions, none more than S before
the weights that learn from it. Which token is of which version depends on timing.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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


class SampledStep(NamedTuple):
    """The groups of one step."""

    all_groups: list[Group]
    """Every group that was sampled."""
    training_groups: list[Group]
    """Those of `all_groups` to learn from."""


class Rollouts:
    """A session's batches, from the run's position on."""

    def __init__(
        self, session: Session, config: RunConfig, position: Position, stopwatch: Stopwatch
    ):
        self.session = session
        self.stopwatch = stopwatch
        """Times of the present step. Sampling that a checkpoint waits for counts for the next."""
        self.staleness: float | None = None
        """Staleness of the batch taken last: versions between the weights that sampled it and those
        that learn from it, mean over its tokens. None if nothing is sampled ahead.
        """
        self.config = config
        self._position = position
        replays = config.from_rollouts is not None
        self._max_staleness = 0 if replays else config.rollout.max_staleness
        self._threads = ThreadPoolExecutor(max(1, self._max_staleness), "sampling-ahead")
        self._sampled = deque(map(_from_plain, position.ahead))
        """Batches of the next steps that are ready, in order."""
        self._requested: deque[tuple[int, Future[Sampled]]] = deque()
        """Steps after those of `_sampled`, in order, with their pending requests."""
        self._next_step = position.step + len(self._sampled)
        """First step, counted from 0, whose batch was not requested yet."""

    def take(self) -> SampledStep:
        """Return the groups of the next step, and begin the batches after it if they are sampled
        ahead.
        """
        self._next_step = max(self._next_step, self._position.step + 1)
        if self._sampled:
            # It stays in `Position.ahead` until `finish_pending`. If this step fails, a checkpoint
            # of the step before is written, and a resumed run learns from this batch again.
            batch = self._sampled.popleft()
        elif self._requested:
            batch = self._next_pending()
        else:
            batch = sample_step(self.session, self.config, self._position.step, self.stopwatch)
        if self._max_staleness:
            completions = [c for group in batch.all_groups for c in group.completions]
            versions = [v for completion in completions for v in completion.versions]
            self.staleness = self._position.version - sum(versions) / len(versions)
            with self.stopwatch("sample"):
                self._request_ahead()
        return batch

    def finish_pending(self) -> None:
        """Drop the batch that was taken from `ahead`. With staleness 1, also wait for the request
        in flight, because a publish must not overlap it.
        """
        # `ahead` keeps one entry for each batch that is ready; the oldest stand first.
        taken = len(self._position.ahead) - len(self._sampled)
        self._position.ahead = self._position.ahead[taken:]
        if self._max_staleness == 1:
            self._collect_pending()

    def position_for_checkpoint(self) -> dict[str, Any]:
        """Wait for all batches that were begun, and return the run's position as plain data.

        The position includes these batches, because weights that are replaced since cannot sample
        them again.
        """
        self._collect_pending()
        return vars(self._position)

    def _collect_pending(self) -> None:
        """Wait for all requests in flight, and make their batches ready."""
        while self._requested:
            batch = self._next_pending()
            self._sampled.append(batch)
            self._position.ahead = [*self._position.ahead, _to_plain(batch)]

    def _request_ahead(self) -> None:
        """Request the batches of the steps up to `rollout.max_staleness` ahead."""
        last = min(self._position.step + self._max_staleness, self.config.steps - 1)
        while self._next_step <= last:
            request = make_request(self.session, self.config, self._next_step)
            # The thread only waits for servers: collective calls belong to the main thread.
            response = self._threads.submit(request.send, self.session)
            self._requested.append((self._next_step, response))
            self._next_step += 1

    def _next_pending(self) -> SampledStep:
        """Wait for the oldest request in flight, and return its batch."""
        step, response = self._requested.popleft()
        return sample_step(self.session, self.config, step, self.stopwatch, response.result)


@dataclass(frozen=True)
class SampleRequest:
    """Request of this process to the engine, for a round of a step."""

    problems: list[Problem]
    """Problems, one for each prompt."""
    prompts: list[Prompt]
    """The problems as token ids."""
    sampling: Sampling
    """Number of completions, lengths, temperature and seeds."""
    speaker: Speaker | None
    """Holds conversations with the engine; None asks for plain answers."""

    def send(self, session: Session) -> Sampled:
        """Send the request to the session's engine, and return prompts and completions."""
        return sample(session.engine, self.speaker, self.problems, self.prompts, self.sampling)


def sample_step(
    session: Session,
    config: RunConfig,
    step: int,
    stopwatch: Stopwatch,
    first_response: Callable[[], Sampled] | None = None,
) -> SampledStep:
    """Return all groups sampled in `step`, and those to learn from.

    With `rollout.dynamic_sampling` (DAPO, arXiv 2503.14476, section 3.2), groups whose rewards are
    all equal are dropped. Rounds are repeated, within its bound, until `rollout.prompts` groups are
    left; there may be fewer, or none. With `from_rollouts` the groups are those of the recorded
    step.

    first_response: waits for the response of the step's first round, if it was requested before.
    Default: request it now. Raises `RewardError` if the reward gave no signal for any completion.
    """
    if config.from_rollouts is not None:
        with stopwatch("sample"):
            return _recorded_step(session, config, Path(config.from_rollouts), step)
    policy = session.policy
    extra_rounds = config.rollout.dynamic_sampling or 0
    wanted = config.rollout.prompts
    sampled: list[Group] = []
    training: list[Group] = []
    for attempt in range(1 + extra_rounds):
        with stopwatch("sample"):
            request = make_request(session, config, step, attempt)
            if first_response is not None and attempt == 0:
                prompts, completions = first_response()
            else:
                prompts, completions = request.send(session)
        with stopwatch("score"):  # each process scores its share; all get all groups
            scored = score_groups(policy.task, request.problems, prompts, completions)
            groups = policy.processes.concatenated(scored)
        sampled += groups
        training += _training_groups(groups, config)
        if len(training) >= wanted:
            break
    if not any(group.completions for group in sampled):
        raise RewardError(
            f"the reward of task {policy.task.name!r} gave None (no signal) for all"
            f" {sum(group.unscored for group in sampled)} completions of step {step + 1}; give a"
            " number where a completion can be judged"
        )
    return SampledStep(sampled, training[:wanted])


def _recorded_step(session: Session, config: RunConfig, run: Path, step: int) -> SampledStep:
    """Return the groups that another run recorded in `step`; those that it dropped have no record.

    Raises `ModelError` for a token that this run's model cannot look up.
    """
    prompter = session.policy.prompter
    recorded = read_groups(step_files(RunFolder(run).tokens)[step + 1])
    for group in recorded:
        tokens = [group.prompt.token_ids, *(c.token_ids for c in group.completions)]
        what = f"recorded problem {group.prompt.id!r}"
        prompter.vocabulary.require(tokens, what, prompter.tokenizer)
    return SampledStep(recorded, _training_groups(recorded, config))


def _training_groups(groups: list[Group], config: RunConfig) -> list[Group]:
    """Return the groups with several completions; under dynamic sampling, with unequal rewards."""
    compared = [group for group in groups if len(group.completions) > 1]
    if config.rollout.dynamic_sampling is None:
        return compared
    return [group for group in compared if len(set(group.rewards)) > 1]


def make_request(session: Session, config: RunConfig, step: int, attempt: int = 0) -> SampleRequest:
    """Make the request of this process: its share of a step's problems, as prompts.

    Problems and seeds depend on (seed, step, attempt) only, so a resumed run repeats them in any
    number of processes. attempt: round of the step, from 0.
    """
    policy = session.policy
    rollout = config.rollout
    processes = policy.processes
    start = (step * (1 + (rollout.dynamic_sampling or 0)) + attempt) * rollout.prompts
    problems = processes.share(policy.task.problems("train", start, rollout.prompts, config.seed))
    first = processes.span(rollout.prompts).start
    sampling = Sampling.of(rollout, step_seed(config.seed, step, attempt), first)
    prompts = [policy.prompter.prompt(problem) for problem in problems]
    speaker = policy.prompter.speaker(policy.task.rollout, policy.task.time_limit)
    return SampleRequest(problems=problems, prompts=prompts, sampling=sampling, speaker=speaker)


def _to_plain(batch: SampledStep) -> dict[str, Any]:
    """Return a batch as plain data; groups to learn from become indices of the sampled ones."""
    sampled = batch.all_groups
    index = {id(group): number for number, group in enumerate(sampled)}
    return {
        "sampled": [
            {**asdict(group), "rewards": [float(reward) for reward in group.rewards]}
            for group in sampled
        ],
        "terms": [
            [getattr(reward, "terms", None) for reward in group.rewards] for group in sampled
        ],
        "to_learn_from": [index[id(group)] for group in batch.training_groups],
    }


def _from_plain(plain: dict[str, Any]) -> SampledStep:
    """Restore a batch from `_to_plain`'s data."""
    sampled = TypeAdapter(list[Group]).validate_python(plain["sampled"])
    for number, terms in enumerate(plain["terms"]):
        rewards = (
            WeightedSum(r, t) if t else r
            for r, t in zip(sampled[number].rewards, terms, strict=True)
        )
        sampled[number] = replace(sampled[number], rewards=tuple(rewards))
    return SampledStep(sampled, [sampled[number] for number in plain["to_learn_from"]])
