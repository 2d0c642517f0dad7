"""What a model of masters is made of, and what vLLM makes of its checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qarl.quant.checkpoint.families import Family
from qarl.quant.layers.compute_copy import MasterCopy
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.layers.stack import LinearStack


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What vLLM makes of a checkpoint of this model. stacked: its linear layers and what it loads
    into each, layers by checkpoint name. unusual: of those, the modules with a dtype or a forward
    of their own. experts: vLLM's name → the checkpoint's of the module. read: (module, parameter) →
    checkpoint name of the tensor, for everything else. heads: names of the modules that make
    logits. embedding: of the input's. steering: tensors that say which experts are chosen and
    nothing else, so that no gradient comes to them.
    """

    architecture: str
    unusual: Mapping[str, Any]
    stacked: Mapping[str, tuple[str, ...]]
    experts: Mapping[str, str]
    read: Mapping[tuple[str, str], str]
    heads: tuple[str, ...]
    steering: tuple[str, ...]
    embedding: str


@dataclass(frozen=True)
class Layers:
    """What a model is made of. linears, experts: by checkpoint name. copies: of everything else, by
    parameter name. routers: by module name. operators: "engine" or "transformers". family: how
    checkpoints name all of it. stacks: of linear layers, by the engine's name of the whole; none
    with transformers' operators, which multiply each alone. engine: what vLLM makes of it, with the
    engine's operators. why_not: why these are not the engine's, where they may be either. frozen:
    copies of what the model came with to be left as it is (a router's correction bias).
    """

    linears: dict[str, LowBitLinear]
    stacks: dict[str, LinearStack]
    experts: dict[str, RoutedLowBitExperts]
    copies: dict[str, MasterCopy]
    routers: tuple[str, ...]
    operators: str
    family: Family
    engine: EngineModel | None = None
    why_not: str = ""
    frozen: tuple[str, ...] = ()

    def low_bit(self) -> Iterator[LowBitLinear | RoutedLowBitExperts]:
        """All that is materialized: linear layers, then experts."""
        yield from self.linears.values()
        yield from self.experts.values()
