"""Job and answer of a trainer's process in `python -m benchmarks learner`.

This module imports nothing heavy.
"""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Task of one trainer's process."""

    model: str
    """Model folder."""
    batch: str
    """File of `Sequences`."""
    setting: str
    """QaRL's scheme, or one of TRL's settings."""
    dtype: str
    """Compute dtype."""
    updates: int
    """Optimizer steps per batch."""
    micro_batch_tokens: int
    """Padded tokens per forward."""
    steps: int
    """Number of timed steps."""
    memory: bool
    """Whether to take one more step and measure its memory."""
    kernel: str = "auto"
    """QaRL's kernel family."""
    variant: str = ""
    """One of QaRL's variants (`benchmarks.learner.measure.VARIANTS`), or "" for none."""
    lr: float = 1e-6

    def as_argument(self) -> str:
        """Return the job as an argument of the worker's command line."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Steps:
    """Measurements of one trainer's process."""

    seconds: list[dict[str, float]]
    """Seconds of each timed step by phase.

    `total` and `cpu` are always among the phases; `cpu` counts all the process's threads.
    """
    step_bytes: int
    """`StepMemory.step`, or 0 if memory was not measured."""
    total_bytes: int
    """`StepMemory.total`, or 0 if memory was not measured."""
    digest: str
    """Digest of the tokens trained on."""
