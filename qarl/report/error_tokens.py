"""Error tokens: the repetitive and garbled tokens that long rollouts of quantized policies fill up
with (QaRL, arXiv
2604.07853, which names them and leaves counting open). Counted from what any engine returns, tokens
  and log-probs:

    improbable   sampled although the sampler gave the token less than IMPROBABLE repeated     part
    of a loop: one n-gram of at most LONGEST_PERIOD tokens, REPEATS or more times in a row

A token that is either is an error token. Both are proxies: a rare word is improbable and a drawn
line is a loop.

What an environment wrote is neither, and is not counted. Axes: T tokens, of all completions laid
end to end.
"""

import math
from collections.abc import Sequence

import numpy as np

from qarl.rollout.types import Completion, Group

IMPROBABLE = 1e-3
"""At temperature 1 such tokens come up as often as the probability they hold together, which a
sound policy keeps small and a broken one does not.
"""

LONGEST_PERIOD = 8
REPEATS = 4


def count_error_tokens(groups: Sequence[Group]) -> dict[str, float | None]:
    """Shares in [0, 1] of the groups' response tokens, one at least, by their names in
    `StepMetrics`.

    error_tokens: improbable or repeated. error_tokens_negative and _positive: among completions
    with less and with more reward than their group's mean, which are those of negative and positive
    advantage; None where there are none.
    """
    completions = [c for g in groups for c in g.completions]
    sampled = np.concatenate([np.asarray(c.sampled, dtype=bool) for c in completions])
    sign = np.repeat(
        [s for g in groups for s in _signs(g.rewards)],
        [len(c.token_ids) for c in completions],
    )[sampled]
    improbable = improbable_tokens(completions)[sampled]
    repeated = repeated_tokens([c.token_ids for c in completions])[sampled]
    error = improbable | repeated

    def share(of: np.ndarray) -> float | None:
        return float(error[of].mean()) if of.any() else None

    return {
        "error_tokens": float(error.mean()),
        "improbable_tokens": float(improbable.mean()),
        "repeated_tokens": float(repeated.mean()),
        "error_tokens_negative": share(sign < 0),
        "error_tokens_positive": share(sign > 0),
    }


def _signs(rewards: Sequence[float]) -> list[int]:
    """-1, 0 or 1 where a reward is below, at or above the group's mean; equal rewards are all at
    it.
    """
    if len(set(rewards)) <= 1:
        return [0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [(r > mean) - (r < mean) for r in rewards]


def improbable_tokens(completions: Sequence[Completion]) -> np.ndarray:
    """Which tokens the sampler gave less than `IMPROBABLE`, bool [T]."""
    logprobs = [np.asarray(c.logprobs, dtype=np.float64) for c in completions]
    return np.concatenate(logprobs) < math.log(IMPROBABLE)


def repeated_tokens(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Which tokens lie in a loop, its first round and a broken-off last one included, bool [T]."""
    # One array with a separator after each sequence, equal to no other element. No loop crosses a
    # separator: a run of T_j = T_j-n that compares one sequence with its neighbour lies between the
    # separator and n places on, too short.
    lengths = np.array([len(s) for s in sequences])
    ends = np.cumsum(lengths + 1) - 1
    tokens = np.full(int(ends[-1]) + 1, -1, dtype=np.int64)
    real = np.ones(len(tokens), dtype=bool)
    real[ends] = False
    tokens[real] = np.concatenate([np.asarray(s, dtype=np.int64) for s in sequences])
    tokens[ends] = -1 - np.arange(len(ends))
    looping = np.zeros(len(tokens), dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, int(lengths.max()) // REPEATS) + 1):
        looping |= _looping(tokens, period)
    return looping[real]


def _looping(tokens: np.ndarray, period: int) -> np.ndarray:
    """Which of `tokens`, int64 [T], lie in a run that repeats after `period` tokens, `REPEATS`
    rounds or longer.
    """
    # same[j + 1]: token j equals the one a period before
    same = np.zeros(len(tokens) + 2, dtype=np.int8)
    same[period + 1 : -1] = tokens[period:] == tokens[:-period]
    edges = np.diff(same)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    long = stops - starts >= (REPEATS - 1) * period
    marks = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.add.at(marks, starts[long] - period, 1)
    np.add.at(marks, stops[long], -1)
    return np.cumsum(marks)[:-1] > 0
