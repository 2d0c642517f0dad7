"""The learning rate of each training step."""

from dataclasses import dataclass

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Linear from lr / warmup up to lr over the first `warmup` steps, linear from lr down to lr /
    decay over the last `decay` of `steps`, over all where there are fewer; None: a run without an
    end, which has no decay.
    """

    lr: float
    warmup: int
    decay: int
    steps: int | None

    def rate(self, step: int) -> float:
        """Of training step `step`, from 0."""
        left = 1.0
        if self.steps is not None and self.decay:
            left = max(0.0, (self.steps - step) / min(self.decay, self.steps))
        return self.lr * min(1.0, (step + 1) / max(self.warmup, 1), left)


def make_schedule(config: OptimizerConfig, steps: int | None) -> Schedule:
    """As configured. Raises `ConfigError` for a decay towards an end that is not known."""
    if config.decay_steps and steps is None:
        raise ConfigError(
            f"learner.optimizer.decay_steps is {config.decay_steps}, but the learner was not told"
            " how many steps there are; give it the number, or leave the decay out"
        )
    return Schedule(config.lr, config.warmup_steps, config.decay_steps, steps)
