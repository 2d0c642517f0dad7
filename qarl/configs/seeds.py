"""Seeds made from a run's one seed, the same in every process and on every machine."""

import hashlib


def stable_hash(*parts: object) -> int:
    """A 64-bit hash of the parts' texts."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def step_seed(seed: int, step: int, attempt: int = 0) -> int:
    """The seed of a step's completions and mini-batches. seed: the run's. attempt: which round of
    prompts it is, where `rollout.dynamic_sampling` asks for more.
    """
    return stable_hash("step", seed, step, *([attempt] if attempt else [])) >> 1
