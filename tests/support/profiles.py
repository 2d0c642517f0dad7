"""Hypothesis' profiles: `ci`, the default, and `thorough` (`make test-thorough`) with more
examples.
"""

from hypothesis import settings

CI_SHARE = 4
"""Divisor of the number of examples in the profile `ci`, which tries at least `FEWEST`."""
FEWEST = 5

# untimed: first calls compile
settings.register_profile("ci", deadline=None, max_examples=100 // CI_SHARE)
settings.register_profile("thorough", deadline=None, max_examples=100)


def thorough() -> bool:
    """Return whether the loaded profile is `thorough`."""
    return settings.default is not None and settings.default.max_examples == 100


def examples(count: int) -> int:
    """Return `count` in the profile `thorough` and a quarter of it in `ci`.

    `@settings` would override a profile's own number.
    """
    return count if thorough() else max(count // CI_SHARE, min(count, FEWEST))
