"""Error tokens: the repetitive and garbled tokens that fill long rollouts of quantized policies.

QaRL (arXiv 2604.07853) names them and leaves counting open. They are counted from tokens and
log-probs, which any engine returns:

    improbable   the sampler gave the token a probability below IMPROBABLE
    repeated     the token is part of a loop: one n-gram of at most LONGEST_PERIOD tokens, REPEATS
                 or more times in a row

A token that is either is an error token. Both are proxies: a rare word is improbable, and a drawn
line is a loop. Tokens that an environment wrote are not counted.

Axes: T tokens, of all completions laid end to end.
"""

import math
from collections.abc import Sequence

import numpy as np

from qarl.rollout.types import LONGEST_PERIOD, Completion, Group

IMPROBABLE = 1e-3
"""Probability below which a sampled token is improbable.

At temperature 1 such tokens are sampled as often as their probabilities add up to. The sum is small
for a sound policy, and not for a broken one.
"""

REPEATS = 4
"""Smallest number of rounds of a loop."""


def count_error_tokens(groups: Sequence[Group]) -> dict[str, float | None]:
    """Return the fractions of error tokens in the groups' sampled tokens, at least one.

    Names are those of `StepMetrics`. error_tokens counts improbable or repeated tokens.
    error_tokens_negative and error_tokens_positive count them in the completions whose reward is
    below and above their group's mean, which are those of negative and positive advantage. They are
    None if there are no such completions.
    """
    completions = [c for g in groups for c in g.completions]
    sampled = np.concatenate([np.asarray(c.sampled, dtype=bool) for c in completions])
    completion_signs = [sign for g in groups for sign in _signs(g.rewards)]
    lengths = [len(c.token_ids) for c in completions]
    sign = np.repeat(completion_signs, lengths)[sampled]
    improbable = improbable_tokens(completions)[sampled]
    repeated = repeated_tokens([c.token_ids for c in completions])[sampled]
    error = improbable | repeated

    def share(mask: np.ndarray) -> float | None:
        return float(error[mask].mean()) if mask.any() else None

    return {
        "error_tokens": float(error.mean()),
        "improbable_tokens": float(improbable.mean()),
        "repeated_tokens": float(repeated.mean()),
        "error_tokens_negative": share(sign < 0),
        "error_tokens_positive": share(sign > 0),
    }


def _signs(rewards: Sequence[float]) -> list[int]:
    """Return -1, 0 or 1 for each reward below, at or above the group's mean."""
    # Equal rewards are at the mean, which rounding may put beside them.
    if len(set(rewards)) <= 1:
        return [0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [(r > mean) - (r < mean) for r in rewards]


def improbable_tokens(completions: Sequence[Completion]) -> np.ndarray:
    """Return which tokens the sampler gave a probability below `IMPROBABLE`, bool [T]."""
    logprobs = [np.asarray(c.logprobs, dtype=np.float64) for c in completions]
    return np.concatenate(logprobs) < math.log(IMPROBABLE)


def repeated_tokens(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return which tokens lie in a loop, bool [T].

    The first round of a loop counts, and a last one that breaks off.
    """
    # Put all sequences into one array, with a separator after each that equals no other element.
    # No loop crosses a separator: a run of T_j = T_j-n that compares one sequence with its
    # neighbour lies between the separator and n places on, which is too short.
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
    """Return which of `tokens`, int64 [T], lie in a loop of that period, bool [T].

    A loop has at least `REPEATS` rounds.
    """
    # same[j + 1] says whether token j equals the one a period before; its ends are 0, so that every
    # run of equal tokens has a rising and a falling edge.
    same = np.zeros(len(tokens) + 2, dtype=np.int8)
    same[period + 1 : -1] = tokens[period:] == tokens[:-period]
    edges = np.diff(same)
    starts = np.flatnonzero(edges == 1)
    stops = np.flatnonzero(edges == -1)
    # A run misses the loop's first round, whose tokens have no equal before them.
    long = stops - starts >= (REPEATS - 1) * period
    # Add 1 where a loop begins and -1 where it ends: the running sum is positive within loops.
    marks = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.add.at(marks, starts[long] - period, 1)
    np.add.at(marks, stops[long], -1)
    return np.cumsum(marks)[:-1] > 0
