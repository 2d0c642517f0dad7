"""The error of a model that cannot be run as asked. Imports neither torch nor vLLM."""

from qarl.configs.errors import InputError


class GraphError(InputError):
    """The engine's model cannot be the learner's graph, or is asked for what it does not do."""

    heading = "operators"
