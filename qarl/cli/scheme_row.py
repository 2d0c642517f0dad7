"""What `qarl schemes` says of one scheme."""

from dataclasses import dataclass

REFERENCE_SHAPE = (4096, 4096)
"""Output rows and input columns of the layer that stands for a model where none is given."""


@dataclass(frozen=True)
class SchemeRow:
    """One scheme. bytes_per_parameter: of the layers it quantizes, scales included; checkpoint_bytes: of all of the
    model's tensors, None without a model; both None where the model's shapes do not fit, as shape_reason says.

    learner_kernel, engine_kernel: what would multiply, as the audit names it, "" where nothing can, for the reason
    beside it.
    """

    name: str
    weights: str
    activations: str
    format: str
    bytes_per_parameter: float | None
    checkpoint_bytes: int | None
    shape_reason: str
    learner_kernel: str
    learner_reason: str
    engine_kernel: str
    engine_reason: str
