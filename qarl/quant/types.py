"""What `quant` hands to other rooms: light, so that a protocol that names it imports neither torch
nor transformers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LowBitTensor:
    """One tensor of the published stream. name: as in the checkpoint; tensor: what the forward
    used.
    """

    name: str
    tensor: "torch.Tensor"


@dataclass(frozen=True)
class LayerReport:
    """A linear layer or a layer's experts as one side of the audit has it. group_size None: by
    rows, or unquantized.
    """

    name: str
    scheme: str
    group_size: int | None
    dtype: str
    kernel: str
