"""A step's completions: one round of prompts, or several where groups that teach nothing are replaced."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qarl.configs.schema.run import RunConfig
from qarl.configs.seeds import step_seed
from qarl.learner.stopwatch import Stopwatch
from qarl.report.recorded_groups import read_groups
from qarl.report.run_folder import RunFolder
from qarl.report.token_files import step_files
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.run.prompts import Sampled, Speaker, sample, score_groups
from qarl.run.session import Session
from qarl.tasks import Problem, RewardError


@dataclass(frozen=True)
class SampleRequest:
    """What this process asks the engine in a round of a step: prompts, stating the problems one by one."""

    problems: list[Problem]
    prompts: list[Prompt]
    sampling: Sampling
    speaker: Speaker | None

    def answered(self, session: Session) -> Sampled:
        """What the session's engine answers."""
        return sample(session.engine, self.speaker, self.problems, self.prompts, self.sampling)


def sample_step(
    session: Session, config: RunConfig, step: int, watch: Stopwatch, first: Callable[[], Sampled] | None = None
) -> tuple[list[Group], list[Group]]:
    """All groups sampled in `step`, and those to learn from. first: what the engine, asked already, answers in the
    step's first round; None asks it now.

    With `rollout.dynamic_sampling` (DAPO, arXiv 2503.14476, section 3.2) groups whose rewards are all equal are dropped
    and rounds repeated, within its bound, until `rollout.prompts` groups are left; there may be fewer, or none.

    With `from_rollouts` they are those of the recorded step; of groups that were dropped there is no record.

    Raises:
        RewardError: the reward gave no signal for any completion.
    """
    policy, extra, wanted = session.policy, config.rollout.dynamic_sampling, config.rollout.prompts
    if config.from_rollouts is not None:
        with watch("sample"):
            recorded = read_groups(step_files(RunFolder(Path(config.from_rollouts)).tokens)[step + 1])
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
            f"the reward of task {policy.task.name!r} gave None (no signal) for all "
            f"{sum(group.unscored for group in sampled)} completions of step {step + 1}; give a number where a "
            "completion can be judged"
        )
    return sampled, kept[:wanted]


def _to_learn_from(groups: list[Group], extra: int | None) -> list[Group]:
    """extra: `rollout.dynamic_sampling`."""
    compared = [group for group in groups if len(group.completions) > 1]
    return compared if extra is None else [group for group in compared if len(set(group.rewards)) > 1]


def make_request(session: Session, config: RunConfig, step: int, attempt: int = 0) -> SampleRequest:
    """Problems and seeds are functions of (seed, step, attempt) alone, so a resumed run repeats them, in however many
    processes. Each asks for its share."""
    policy, rollout, processes = session.policy, config.rollout, session.policy.processes
    start = (step * (1 + (rollout.dynamic_sampling or 0)) + attempt) * rollout.prompts
    problems = processes.share(policy.task.problems("train", start, rollout.prompts, config.seed))
    first = processes.span(rollout.prompts).start
    sampling = Sampling.of(rollout, step_seed(config.seed, step, attempt), first)
    prompts = [policy.prompter.prompt(problem) for problem in problems]
    speaker = policy.prompter.speaker(policy.task.rollout, policy.task.time_limit)
    return SampleRequest(problems=problems, prompts=prompts, sampling=sampling, speaker=speaker)
