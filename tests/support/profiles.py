"""How much chance is tried: hypothesis' profiles `ci`, the default, and `thorough` (`make
test-thorough`).
"""

from hypothesis import settings

CI_SHARE = 4
"""The profile `ci` tries one example in so many, but at least `FEWEST`."""
FEWEST = 5

# untimed: first calls compile
settings.register_profile("ci", deadline=None, max_examples=100 // CI_SHARE)
settings.register_profile("thorough", deadline=None, max_examples=100)


def thorough() -> bool:
    """Whether the loaded profile is `thorough`."""
    return settings.default is not None and settings.default.max_examples == 100


def examples(count: int) -> int:
    """`count` in the profile `thorough`, a quarter in `ci`: `@settings` would overrule a
    profile.
    """
    return count if thorough() else max(count // CI_SHARE, min(count, FEWEST))
