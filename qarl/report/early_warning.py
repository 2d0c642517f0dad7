"""Signs in a run's metrics that it is going wrong, each reported once a run.

The mean of the last `WINDOW` steps is compared with the mean of the first; the reward's also with
its best mean so far. A difference of rewards counts if it is larger than six standard errors,
because the best of many windows is high by chance. The noise of a step is estimated from the
differences of consecutive steps.

The first step is also looked at by itself: how far its updates moved the policy.

The thresholds are below, and docs/guide/report.md explains them. Runs that learn give no warning,
nor do runs that learn nothing (tests/qarl/test_early_warning.py), so that a warning is worth a
look.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qarl.configs.errors import QarlError

WINDOW = 10
"""Number of steps that are averaged."""

MISMATCH = 0.05
"""Mean |Δ log p| of a warning, in nats a token, if it has also grown by `MISMATCH_GROWN`."""

MISMATCH_GROWN = 3.0
"""Ratio of the mean |Δ log p| to its start."""

ENTROPY_LEFT = 0.1
"""Ratio of the entropy to its start, below which a policy has collapsed unless it gained reward."""

ENTROPY_GROWN = 2.0
"""Ratio of the entropy to its start, above which a policy that lost reward is becoming noise."""

LENGTH_GROWN = 2.0
"""Ratio of a completion's tokens to their start, above which a loss of reward is a sign."""

LENGTH_LEFT = 0.5
"""Ratio of a completion's tokens to their start, below which a loss of reward is a sign."""

TRUNCATED = 0.5
"""Fraction of truncated completions, if it has also doubled since the first step."""

DEVIATION_GROWN = 1.25
"""Ratio of the deviation within groups to its start, above which a loss of reward is a sign."""

REWARD_LOST = 0.5
"""Fraction of the gained reward that a run may lose."""

ERRORS = 6.0
"""Standard errors by which two means of rewards have to differ."""


FIRST_STEP = 0.4
"""KL(π_start ‖ π) after the first step, in nats a token, above which its updates were too large.

On SmolLM2-135M the runs of docs/lab/real.md that learned began with 0.11 to 0.26. Runs that began
with 0.42 and 1.65 fell, or learned in one seed and not in the other.
"""


@dataclass(frozen=True)
class EarlyWarning:
    """A sign that a run is going wrong."""

    sign: str
    """Kind of the sign: first step, mismatch, entropy, length, deviation, reward or groups."""

    step: int
    """The step that showed it first."""

    text: str
    """The sign, its size, and where to look."""


class EarlyWarningError(QarlError, heading="early warning"):
    """Raised when a warning stops a run (`early_warning: stop`)."""

    def __init__(self, warnings: Sequence[EarlyWarning]):
        signs = "; ".join(warning.text for warning in warnings)
        step = warnings[0].step
        # before the first step there is no checkpoint
        again = "Resume from the checkpoint before it" if step > 1 else "Start again"
        super().__init__(
            f"stopped at step {step}: {signs}. {again} with other settings, or with"
            " --early_warning warn to go on in spite of it"
        )


class _Series:
    """The first and the last `WINDOW` values of a metric."""

    def __init__(self) -> None:
        self.first: list[float] = []
        """The first values."""
        self.recent: deque[float] = deque(maxlen=WINDOW)
        """The last values."""
        self.count = 0
        """Number of all values."""
        self.best = -math.inf
        """Largest mean of a window before the last."""
        self._squares = 0.0
        """Sum of the squared differences of consecutive values."""

    def add(self, value: float | None) -> None:
        """Append a value; a step that did not measure the metric has None."""
        if value is None or not math.isfinite(value):
            return
        if len(self.first) < WINDOW:
            self.first.append(value)
        else:
            self.best = max(self.best, self.now)
        if self.recent:
            self._squares += (value - self.recent[-1]) ** 2
        self.recent.append(value)
        self.count += 1

    @property
    def comparable(self) -> bool:
        """True if the two windows have no value in common."""
        return self.count >= 2 * WINDOW

    @property
    def start(self) -> float:
        """Mean of the first window."""
        return sum(self.first) / len(self.first)

    @property
    def now(self) -> float:
        """Mean of the last window."""
        return sum(self.recent) / len(self.recent)

    @property
    def error(self) -> float:
        """Standard error of the difference of two windows' means.

        Consecutive values differ by 2σ² in mean square, σ² the variance of one value. The
        difference of two windows' means has the variance 2σ² / `WINDOW`.
        """
        return math.sqrt(self._squares / (self.count - 1) / WINDOW)


_FIELDS = {
    "reward": "reward",
    "deviation": "reward_deviation",
    "tokens": "response_tokens",
    "truncated": "truncated",
    "mismatch": "learn/mismatch/mean_abs",
    "entropy": "learn/entropy",
    "groups": "mixed_reward_groups",
}


class RunWatch:
    """Watches the metrics of one run for signs."""

    def __init__(
        self,
        before: Iterable[Mapping[str, Any]] = (),
        stops: bool = False,
        last_step: int | None = None,
    ):
        """Take in the steps before.

        before: lines of metrics.jsonl of a run that goes on; their signs are not reported again.
        stops: whether a sign stops the run (`early_warning: stop`).
        last_step: the run's last step, which nothing stops, because the run ends with it anyway.
        """
        self._series = {name: _Series() for name in _FIELDS}
        self._first_step: float | None = None
        """KL(π_start ‖ π) after the first step, in nats a token; None if it was not measured."""
        self._seen: set[str] = set()
        self._last_step = last_step
        self._stops = False
        for line in before:
            self.add(line)
        self._stops = stops

    def add(self, line: Mapping[str, Any]) -> list[EarlyWarning]:
        """Take in one step, a line of metrics.jsonl, and return the signs that it shows first.

        Raises `EarlyWarningError` if a sign is to stop the run at this step.
        """
        for name, field in _FIELDS.items():
            self._series[name].add(line.get(field))
        if line["step"] == 1:
            self._first_step = line.get("learn/kl_from_start")
        new_signs = {sign: text for sign, text in self._signs() if sign not in self._seen}
        self._seen |= new_signs.keys()
        warnings = [EarlyWarning(sign, line["step"], text) for sign, text in new_signs.items()]
        if warnings and self._stops and line["step"] != self._last_step:
            raise EarlyWarningError(warnings)
        return warnings

    def _signs(self) -> Iterator[tuple[str, str]]:
        """Yield (sign, text) of every sign that the steps so far show."""
        yield from self._first_step_signs(self._first_step)
        yield from self._mismatch_signs(self._series["mismatch"])
        yield from self._entropy_signs(self._series["entropy"])
        yield from self._length_signs(self._series["tokens"], self._series["truncated"])
        yield from self._reward_signs(self._series["reward"], self._series["deviation"])
        yield from self._group_signs(self._series["groups"], self._series["reward"])

    def _first_step_signs(self, moved: float | None) -> Iterator[tuple[str, str]]:
        if moved is not None and moved > FIRST_STEP:
            yield (
                "first step",
                (
                    f"the first step moved the policy by {moved:.2g} nats a token (KL): all later"
                    " steps learn from what it left; lower the learning rate, raise"
                    " learner.optimizer.warmup_steps, or take more answers a step; in few bits,"
                    " start from calibrated codes whose scales stay (quantization.init gptq,"
                    " quantization.scale kept), or from qarl sft in the scheme"
                ),
            )

    def _mismatch_signs(self, mismatch: _Series) -> Iterator[tuple[str, str]]:
        if not mismatch.comparable:
            return
        if mismatch.now > max(MISMATCH, MISMATCH_GROWN * mismatch.start):
            yield (
                "mismatch",
                (
                    f"mean |Δ log p| of learner and sampler grew from {mismatch.start:.2g} to"
                    f" {mismatch.now:.2g} nats a token: updates are made for another policy than"
                    " the one that samples; see learn/log_ratio for the part that grew"
                ),
            )

    def _entropy_signs(self, entropy: _Series) -> Iterator[tuple[str, str]]:
        if not entropy.comparable:
            return
        words = f"entropy went from {entropy.start:.2g} to {entropy.now:.2g} nats a token"
        if entropy.now < ENTROPY_LEFT * entropy.start and not self._gained():
            yield (
                "entropy",
                (
                    f"{words}, without a gain in reward: the policy has collapsed; lower the"
                    " learning rate, or add a KL penalty"
                ),
            )
        if entropy.now > ENTROPY_GROWN * entropy.start and self._lost():
            yield (
                "entropy",
                (
                    f"{words}, and the reward fell: the policy is becoming noise; lower the"
                    " learning rate"
                ),
            )

    def _length_signs(self, tokens: _Series, truncated: _Series) -> Iterator[tuple[str, str]]:
        if not tokens.comparable:
            return
        words = f"completions went from {tokens.start:,.0f} to {tokens.now:,.0f} tokens"
        # Compared with the first step, not the first window: a policy may break within a few steps.
        cut = truncated.now > max(TRUNCATED, 2 * truncated.first[0])
        if cut or (tokens.now > LENGTH_GROWN * tokens.start and self._lost()):
            yield (
                "length",
                (
                    f"{words}, {truncated.now:.0%} of them cut off: look for loops among them (qarl"
                    " report), or raise rollout.max_new_tokens"
                ),
            )
        if tokens.now < LENGTH_LEFT * tokens.start and self._lost():
            yield (
                "length",
                f"{words}, and the reward fell: the policy stops before it answers",
            )

    def _reward_signs(self, reward: _Series, deviation: _Series) -> Iterator[tuple[str, str]]:
        grown = deviation.comparable and deviation.now > DEVIATION_GROWN * deviation.start
        if grown and self._lost():
            yield (
                "deviation",
                (
                    f"the reward's deviation within groups grew from {deviation.start:.2g} to"
                    f" {deviation.now:.2g} while the reward fell from {reward.best:.3g} to"
                    f" {reward.now:.3g}: what rewards differ by is noise"
                ),
            )
        if self._lost():
            yield (
                "reward",
                (
                    f"the reward fell from {reward.best:.3g} to {reward.now:.3g}: the checkpoints"
                    " in between are better; lower the learning rate, or see learn/mismatch and"
                    " learn/phantom_clipped"
                ),
            )

    def _group_signs(self, groups: _Series, reward: _Series) -> Iterator[tuple[str, str]]:
        if groups.count >= WINDOW and groups.now == 0:
            yield (
                "groups",
                (
                    f"{WINDOW} steps in a row taught nothing: within every group all rewards were"
                    f" equal, {reward.now:.3g} on average; the task is solved or out of reach, or"
                    " the policy broke early"
                ),
            )

    def _gained(self) -> bool:
        """True if the reward is higher than at the start, beyond chance."""
        reward = self._series["reward"]
        return reward.comparable and reward.now - reward.start > ERRORS * reward.error

    def _lost(self) -> bool:
        """True if the reward has lost half or more of its gain, beyond chance."""
        reward = self._series["reward"]
        if not reward.comparable:
            return False
        fallen = reward.best - reward.now
        gained = reward.best - reward.start
        return fallen > max(ERRORS * reward.error, REWARD_LOST * gained)


def early_warnings(lines: Iterable[Mapping[str, Any]]) -> list[EarlyWarning]:
    """Return all warnings of a run. lines: the run's metrics.jsonl, parsed."""
    watch = RunWatch()
    return [warning for line in lines for warning in watch.add(line)]
