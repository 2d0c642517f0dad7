"""Compare a running engine's routed experts with the trainer's, by their outputs.

Kernels fuse an expert's three matrices with its activation, so that no product gives a single
matrix. Each expert is asked for its outputs y of fixed inputs x, which are compared with
y = W_down (silu(W_gate x) ⊙ W_up x) of the trainer's matrices, in float32.

Axes: N fixed inputs, H model width, O output rows, I input columns.
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import silu

from qarl.quant.kernels.held_weights import probes
from qarl.verify.engines import HeldExperts
from qarl.verify.findings import Cause, fault
from qarl.verify.sides import Side

LEAVES = ("gate_proj", "up_proj", "down_proj")
_OTHER_LEAVES = (LEAVES, ("w1", "w3", "w2"))
"""Names of an expert's matrices in checkpoints: gate, up, down."""
_BOUND = 0.02
"""Largest relative distance of outputs that is rounding: to the compute dtype after each matrix."""
_BOUND_OF_ACTIVATIONS = 0.1
"""The same, if the engine quantizes activations."""

Weight = Callable[[str], torch.Tensor | None]
"""Return a layer's weight as the engine multiplies with it, fp32 [O, I]; None if it is unknown."""


def compare_experts(
    experts: HeldExperts,
    trainer: Side,
    weight: Weight,
    quantized_inputs: bool,
) -> Iterator[tuple[str, str, Cause | None]]:
    """Yield each expert's name, its state, and the cause if it differs.

    Args:
        experts: The engine's experts of one layer.
        trainer: The trainer's side.
        weight: Reads the trainer's matrices.
        quantized_inputs: Whether the engine quantizes activations.

    Raises:
        KeyError: The trainer has no experts of this name.
    """
    leaves = next(
        (
            leaves
            for leaves in _OTHER_LEAVES
            if all(f"{experts.name}.0.{leaf}" in trainer.layers for leaf in leaves)
        ),
        None,
    )
    if leaves is None:
        raise KeyError(experts.name)
    bound = _BOUND_OF_ACTIVATIONS if quantized_inputs else _BOUND
    expected: dict[int, torch.Tensor] = {}
    for number in range(experts.count):
        matrices = [weight(f"{experts.name}.{number}.{leaf}") for leaf in leaves]
        if all(matrix is not None for matrix in matrices):
            expected[number] = _outputs([m for m in matrices if m is not None])
    for number in range(experts.count):
        name = f"{experts.name}.{number}"
        outputs = experts.outputs(number).float()
        distances = {other: _distance(outputs, each) for other, each in expected.items()}
        nearest = min(distances, key=lambda other: distances[other], default=number)
        if number not in distances:
            yield name, "different", fault("missing", name, "the engine alone has it")
        elif nearest != number and distances[nearest] <= bound:
            cause = fault(
                "expert-order",
                name,
                f"the engine's expert computes the trainer's expert {nearest}'s outputs",
                "publish experts in the order of the router's rows",
            )
            yield name, "different", cause
        elif distances[number] <= bound:
            yield name, "experts that compute as these masters, up to rounding", None
        else:
            cause = fault(
                "stale",
                name,
                f"its outputs are {distances[number]:.2g} of their norm from those of the trainer's"
                f" matrices; rounding is below {bound:g}",
                "publish the trainer's present weights, and compare again",
            )
            yield name, "different", cause


def _outputs(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Return an expert's outputs of the fixed inputs, fp32 [N, H]."""
    gate, up, down = matrices
    x = probes(gate.shape[1])
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return ‖one − other‖ / ‖one‖; infinity for other shapes and values that are not finite."""
    if one.shape != other.shape or not (one.isfinite().all() and other.isfinite().all()):
        return float("inf")
    return float((one - other).norm() / one.norm().clamp(min=1e-30))
