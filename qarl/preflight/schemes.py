"""Check of a run's schemes against the model's shapes, from its config.json alone."""

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import check_shapes
from qarl.planning.shapes import Shapes, schemes_of, sizes_of


def check_schemes(config: RunConfig) -> None:
    """Raise `SchemeError` if a matrix of the model does not fit its scheme.

    A model whose shapes are unknown without torch is left to `qarl.preflight.support`.
    """
    try:
        shapes, _ = sizes_of(config.model)
    except (ModelError, ConfigError):
        return
    check_fit(config, shapes)


def check_fit(config: RunConfig, shapes: Shapes) -> None:
    """Raise `SchemeError` if one of these matrices does not fit its scheme."""
    if shapes.exact:
        check_shapes(schemes_of(shapes, config.scheme, config.layers))
