"""What `python -m benchmarks learner` asks of a trainer's process, and what that answers. Imports
nothing heavy.
"""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """model: folder. batch: file of `Sequences`. setting: QaRL's scheme, or one of TRL's settings.
    updates: optimizer steps a batch. micro_batch_tokens: padded tokens a forward. steps: to time.
    memory: whether to take the memory of one more. kernel: QaRL's kernel family. variant: one of
    QaRL's (`benchmarks.learner.measure.VARIANTS`), or none.
    """

    model: str
    batch: str
    setting: str
    dtype: str
    updates: int
    micro_batch_tokens: int
    steps: int
    memory: bool
    kernel: str = "auto"
    variant: str = ""
    lr: float = 1e-6

    def as_argument(self) -> str:
        """For the worker's command line."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Steps:
    """seconds: of each timed step by phase; `total` and `cpu`, those of all the process's threads,
    always among them. step_bytes, total_bytes: see `StepMemory`, 0 where memory was not asked for.
    digest: of the tokens trained on.
    """

    seconds: list[dict[str, float]]
    step_bytes: int
    total_bytes: int
    digest: str
