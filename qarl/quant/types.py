"""Types that `quant` hands to other packages.

This module imports neither torch nor transformers, so a protocol that names these types stays
light.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LowBitTensor:
    """One tensor of the published stream."""

    name: str
    """Name of the tensor in the checkpoint."""
    tensor: "torch.Tensor"
    """The values that the forward used."""


@dataclass(frozen=True)
class LayerReport:
    """A linear layer, or a layer's experts, as one side of the audit reports it."""

    name: str
    """Checkpoint name of the layer."""
    scheme: str
    """Name of the quantization scheme."""
    group_size: int | None
    """Input columns that share a scale; None for a scale per row and for unquantized weights."""
    dtype: str
    """Name of the compute dtype."""
    kernel: str
    """Name of the kernel that multiplies."""
