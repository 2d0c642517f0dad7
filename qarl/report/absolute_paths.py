"""A run's configuration with absolute paths: it is resumed and evaluated from any working folder."""

from pathlib import Path

from qarl.configs.load import is_embedded
from qarl.configs.schema.objectives import OwnConfig
from qarl.configs.schema.run import RunConfig
from qarl.tasks.paths import absolute, absolute_function


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """With the paths of model, questions and functions absolute, as they are found from the working folder. Names of
    what is no file here (built-in tasks, ids on the Hub, modules) stay."""
    here, objective = Path.cwd(), config.learner.objective
    if isinstance(objective, OwnConfig):
        objective = objective.model_copy(update={"function": absolute_function(objective.function, here)})
    model = Path(config.model).expanduser()
    local = model.is_dir() and not is_embedded(config.model)
    return config.model_copy(
        update={
            "from_rollouts": config.from_rollouts and str(Path(config.from_rollouts).expanduser().absolute()),
            "model": str(model.absolute()) if local else config.model,
            "task": absolute(config.task, here),
            "learner": config.learner.model_copy(update={"objective": objective}),
        }
    )
