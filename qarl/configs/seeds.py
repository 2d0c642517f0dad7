"""Seeds derived from a run's seed, the same in every process and on every machine."""

import hashlib


def stable_hash(*parts: object) -> int:
    """Return a 64-bit hash of the parts' texts."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def step_seed(seed: int, step: int, attempt: int = 0) -> int:
    """Return the seed of a step's completions and mini-batches.

    seed: the run's. attempt: round of prompts, counted from 0, if `rollout.dynamic_sampling` asks
    for several.
    """
    return stable_hash("step", seed, step, *([attempt] if attempt else [])) >> 1
