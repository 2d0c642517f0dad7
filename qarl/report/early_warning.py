"""Signs that a run is going wrong, out of its metrics as they come: one warning a sign and run.

The mean of the last `WINDOW` steps is compared with that of the first, and of the reward also with
the best so far. A difference of rewards counts where it is beyond six times its standard error,
with the noise of a step as consecutive steps show it: the best of many windows is high by chance.
Thresholds are named below; docs/guide/report.md says which they are. Silent on runs that learn, and
on runs that learn nothing (tests/qarl/test_early_warning.py), so a warning is worth a look.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qarl.configs.errors import QarlError

WINDOW = 10
"""Steps that are averaged."""

MISMATCH, MISMATCH_GROWN = 0.05, 3.0
ENTROPY_LEFT, ENTROPY_GROWN = 0.1, 2.0
LENGTH_GROWN, LENGTH_LEFT, TRUNCATED = 2.0, 0.5, 0.5
DEVIATION_GROWN = 1.25
REWARD_LOST = 0.5
ERRORS = 6.0


@dataclass(frozen=True)
class EarlyWarning:
    """sign: mismatch, entropy, length, deviation, reward or groups. step: of it. text: what, how
    big, where to look.
    """

    sign: str
    step: int
    text: str


class EarlyWarningError(QarlError, heading="early warning"):
    """A run was stopped for a warning (`early_warning: stop`)."""

    def __init__(self, warnings: Sequence[EarlyWarning]):
        signs = "; ".join(warning.text for warning in warnings)
        super().__init__(
            f"stopped at step {warnings[0].step}: {signs}. Resume from the checkpoint before it"
            " with other settings, or with --early_warning warn to go on in spite of it"
        )


class _Series:
    """A metric's first and last `WINDOW` values, where it has them. best: largest mean of as many
    before.
    """

    def __init__(self) -> None:
        self.first: list[float] = []
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        self.best = -math.inf
        self._squares = 0.0

    def add(self, value: float | None) -> None:
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
    def whole(self) -> bool:
        """Whether the two windows are apart."""
        return self.count >= 2 * WINDOW

    @property
    def start(self) -> float:
        return sum(self.first) / len(self.first)

    @property
    def now(self) -> float:
        return sum(self.recent) / len(self.recent)

    @property
    def error(self) -> float:
        """Standard error of the difference of two windows, for the noise that consecutive values
        differ by.
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
    """Over one run. before: the lines of metrics.jsonl so far, of a run that goes on; what they
    showed is not shown again. stop_before: the step before which a sign stops the run
    (`early_warning: stop`); 0: none does.
    """

    def __init__(self, before: Iterable[Mapping[str, Any]] = (), stop_before: int = 0):
        self._series = {name: _Series() for name in _FIELDS}
        self._seen: set[str] = set()
        self._stop_before = 0
        for line in before:
            self.add(line)
        self._stop_before = stop_before

    def add(self, line: Mapping[str, Any]) -> list[EarlyWarning]:
        """What a step shows for the first time. line: of metrics.jsonl. Raises
        `EarlyWarningError`.
        """
        for name, field in _FIELDS.items():
            self._series[name].add(line.get(field))
        new_signs = {sign: text for sign, text in self._signs() if sign not in self._seen}
        self._seen |= new_signs.keys()
        warnings = [EarlyWarning(sign, line["step"], text) for sign, text in new_signs.items()]
        if warnings and line["step"] < self._stop_before:
            raise EarlyWarningError(warnings)
        return warnings

    def _signs(self) -> Iterator[tuple[str, str]]:
        yield from self._of_mismatch(self._series["mismatch"])
        yield from self._of_entropy(self._series["entropy"])
        yield from self._of_length(self._series["tokens"], self._series["truncated"])
        yield from self._of_reward(self._series["reward"], self._series["deviation"])
        yield from self._of_groups(self._series["groups"], self._series["reward"])

    def _of_mismatch(self, mismatch: _Series) -> Iterator[tuple[str, str]]:
        if mismatch.whole and mismatch.now > max(MISMATCH, MISMATCH_GROWN * mismatch.start):
            yield (
                "mismatch",
                (
                    f"mean |Δ log p| of learner and sampler grew from {mismatch.start:.2g} to"
                    f" {mismatch.now:.2g} nats a token: updates are made for another policy than"
                    " the one that samples; see learn/log_ratio for the part that grew"
                ),
            )

    def _of_entropy(self, entropy: _Series) -> Iterator[tuple[str, str]]:
        if not entropy.whole:
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

    def _of_length(self, tokens: _Series, truncated: _Series) -> Iterator[tuple[str, str]]:
        if not tokens.whole:
            return
        words = f"completions went from {tokens.start:,.0f} to {tokens.now:,.0f} tokens"
        # a policy may break within a few steps
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

    def _of_reward(self, reward: _Series, deviation: _Series) -> Iterator[tuple[str, str]]:
        if deviation.whole and deviation.now > DEVIATION_GROWN * deviation.start and self._lost():
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

    def _of_groups(self, groups: _Series, reward: _Series) -> Iterator[tuple[str, str]]:
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
        reward = self._series["reward"]
        return reward.whole and reward.now - reward.start > ERRORS * reward.error

    def _lost(self) -> bool:
        """Whether the reward has lost half of what it had gained, or more than it had."""
        reward = self._series["reward"]
        if not reward.whole:
            return False
        fallen = reward.best - reward.now
        return fallen > max(ERRORS * reward.error, REWARD_LOST * (reward.best - reward.start))


def early_warnings(lines: Iterable[Mapping[str, Any]]) -> list[EarlyWarning]:
    """Of a whole run. lines: of metrics.jsonl."""
    watch = RunWatch()
    return [warning for line in lines for warning in watch.add(line)]
