"""What a run does to its updates where it shows signs of going wrong (`early_warning`)."""

from dataclasses import dataclass

from qarl.configs.schema.learner import LearnerConfig


@dataclass(frozen=True)
class Damping:
    """Of one step. rate: factor of the learning rate. cap: power to which the correction's cap and floor are raised,
    towards 1, so that mismatch weights are cut sooner; 1 leaves them."""

    rate: float = 1.0
    cap: float = 1.0

    def of_loss(self, config: LearnerConfig) -> LearnerConfig:
        """The same configuration with the correction's bounds moved."""
        if self.cap == 1.0:
            return config
        bounds = {name: getattr(config.correction, name, None) for name in ("cap", "floor")}
        moved = {name: bound**self.cap for name, bound in bounds.items() if bound is not None}
        return config.model_copy(update={"correction": config.correction.model_copy(update=moved)})


UNDAMPED = Damping()
