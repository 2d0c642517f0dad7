"""The learning rate of each training step."""

from dataclasses import dataclass

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate with a linear warm-up and a linear decay."""

    lr: float
    """Highest learning rate."""
    warmup: int
    """Number of steps over which the rate rises linearly from lr / warmup to lr."""
    decay: int
    """Number of last steps over which the rate falls linearly from lr to lr / decay; all steps, if
    there are fewer.
    """
    steps: int | None
    """Number of training steps. None: unknown, so there is no decay."""

    def rate(self, step: int) -> float:
        """Return the learning rate of training step `step`, from 0."""
        decay = 1.0
        if self.steps is not None and self.decay:
            decay = max(0.0, (self.steps - step) / min(self.decay, self.steps))
        warmup = (step + 1) / max(self.warmup, 1)
        return self.lr * min(1.0, warmup, decay)


def make_schedule(config: OptimizerConfig, steps: int | None) -> Schedule:
    """Return the configured schedule.

    Raises `ConfigError` if there is a decay, but the number of steps is unknown.
    """
    if config.decay_steps and steps is None:
        raise ConfigError(
            f"learner.optimizer.decay_steps is {config.decay_steps}, but the learner was not told"
            " how many steps there are; give it the number, or omit the decay"
        )
    return Schedule(config.lr, config.warmup_steps, config.decay_steps, steps)
