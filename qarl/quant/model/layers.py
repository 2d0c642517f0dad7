"""The layers of a model of masters, and vLLM's view of its checkpoint."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qarl.quant.checkpoint.families import Family
from qarl.quant.layers.compute_copy import MasterCopy
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.layers.stack import LinearStack

Divided = Literal["rows", "heads", "columns"]
"""Output rows (a column-parallel layer, by vLLM's name); the same of q, k and v, where keys and
values of fewer heads than ranks are repeated; or input columns (a row-parallel layer).
"""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """vLLM's modules for a checkpoint of this model, and the tensors that it loads into each."""

    architecture: str
    """The architecture's name in transformers."""
    custom_linears: Mapping[str, Any]
    """vLLM's name → module, for linear layers with a dtype or a forward of their own."""
    stacked: Mapping[str, tuple[str, ...]]
    """vLLM's name of each linear layer → checkpoint names of the layers that are loaded into it."""
    divided: Mapping[str, Divided]
    """vLLM's name → what a tensor-parallel engine divides of a linear layer's weight among its
    ranks; layers that it does not divide are left out.
    """
    biased: Collection[str]
    """vLLM's names of linear layers with a bias."""
    ranks_refusal: str
    """Why the learner cannot compute this model as several ranks do, with the layer's name; "" if
    it can.
    """
    experts: Mapping[str, str]
    """vLLM's name of each experts' runner → the checkpoint's name of the experts."""
    loaded_from: Mapping[tuple[str, str], str]
    """(module, parameter) by vLLM's names → checkpoint name of the tensor that vLLM loads into it,
    for everything outside linear layers and experts.
    """
    in_fp32: Collection[str]
    """Checkpoint names of tensors that vLLM holds in float32, whatever the compute dtype."""
    heads: tuple[str, ...]
    """vLLM's names of the modules that compute logits."""
    correction_biases: tuple[str, ...]
    """Checkpoint names of routers' correction biases, which only decide which experts are chosen,
    so that they get no gradient.
    """
    embedding: str
    """vLLM's name of the input embedding."""


@dataclass(frozen=True)
class Layers:
    """The low-bit layers and copies that a model consists of."""

    linears: dict[str, LowBitLinear]
    """Checkpoint name → linear layer."""
    stacks: dict[str, LinearStack]
    """The engine's name → stack of linear layers. Empty with transformers' operators, which
    multiply each layer alone.
    """
    experts: dict[str, RoutedLowBitExperts]
    """Checkpoint name → routed experts."""
    copies: dict[str, MasterCopy]
    """Parameter name → copy, for everything outside linear layers and experts."""
    routers: tuple[str, ...]
    """Module names of the routers."""
    operators: str
    """Source of the operators between the layers: "engine" or "transformers"."""
    family: Family
    """Checkpoint names of the architecture's weights."""
    engine: EngineModel | None = None
    """vLLM's modules for the checkpoint; None with transformers' operators."""
    why_not: str = ""
    """Reason why the operators are transformers' although "auto" allows the engine's; otherwise
    "".
    """
    frozen: tuple[str, ...] = ()
    """Parameter names of copies that must keep their loaded values (a router's correction bias)."""

    def low_bit(self) -> Iterator[LowBitLinear | RoutedLowBitExperts]:
        """Yield all layers that are materialized: linear layers, then experts."""
        yield from self.linears.values()
        yield from self.experts.values()
