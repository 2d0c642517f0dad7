"""What becomes of updates on their way to the sampler, measured every so many steps (`learner.diagnostics_every`).

An update of 1e-6 can be lost twice: where a 16-bit master is rounded back to what it was, and where a master moved and
neither its low-bit code nor its bfloat16 rounding did.

    lost_updates      of the weights the optimizer meant to move, the share whose stored master did not change
    crossed_bfloat16  of all masters, the share that an update took to another bfloat16
    flipped_codes     of all low-bit codes, the share that a materialization changed

The last two by layer too. `diagnostics.decomposition` measures in the same steps what of it the sampler's policy does.
Source of the second: "Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026; section 6.6).
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qarl.learner.diagnostics.base import Learning, Observer, is_due
from qarl.learner.diagnostics.figure import Figure
from qarl.learner.optim.optimizer import UpdateDiagnostics
from qarl.quant.materialize.code_changes import Changed, FlipCount
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.runtime.shards import whole_shape


@dataclass(frozen=True)
class LayerChanges:
    """Columns of one length, a row a layer in the model's order, means over a batch's updates; None where nothing was
    measured. layer: checkpoint name of a linear layer or of experts, or a parameter's name. flipped_codes: share of its
    codes, None without any; crossed_bfloat16: of its masters, None for frozen ones."""

    layer: list[str] | None = None
    flipped_codes: list[float | None] | None = None
    crossed_bfloat16: list[float | None] | None = None


class LostUpdates(Observer):
    """Counts over a batch's updates and their materializations."""

    figures = (
        Figure(
            id="codes", title="Updates that count", unit="share",
            help="Low-bit codes that an update changed; masters that it took to another bfloat16; updates lost to the "
            "masters' rounding.",
            lines={
                "flipped codes": "learn/flipped_codes", "crossed bfloat16": "learn/crossed_bfloat16",
                "lost updates": "learn/lost_updates",
            },
        ),
        Figure(
            id="layers", title="What updates change, layer by layer", unit="share", axis="layer, in the model's order",
            help="Low-bit codes that an update changed, and masters that it took to another bfloat16: mean over the "
            "measured steps; bands reach from the lowest to the highest.",
            lines={
                "flipped codes": "learn/layers/flipped_codes", "crossed bfloat16": "learn/layers/crossed_bfloat16",
            },
            logarithmic=True, labels="learn/layers/layer",
        ),
    )  # fmt: skip

    def __init__(self, learning: Learning):
        super().__init__(learning)
        self.counts_arrivals = is_due(learning.config.diagnostics_every, learning.step)
        self.flips = FlipCount() if self.counts_arrivals else None
        self._lost: list[float] = []
        self._crossed: defaultdict[str, Changed] = defaultdict(Changed)

    def after_update(self, update: int, arrived: UpdateDiagnostics | None) -> None:
        """Take in what an optimizer step returned (`MasterOptimizer.step` with `diagnose`)."""
        if arrived is None:
            return
        self._lost.append(arrived.lost)
        for name, (crossed, weights) in arrived.crossed.items():
            self._crossed[name].add(crossed, weights)

    def record(self) -> dict[str, Any]:
        """Means over the updates taken, None where there were none; flipped_codes also where no layer has low-bit
        codes, crossed_bfloat16 where no weight of the model is trained (LoRA)."""
        if self.flips is None:
            unmeasured = dict.fromkeys(("lost_updates", "crossed_bfloat16", "flipped_codes"))
            return {**unmeasured, "layers": LayerChanges()}
        model = self.learning.model
        crossed = {} if model.adapted else self._crossed
        total = Changed()
        for each in crossed.values():
            total.add(each.changed, each.count)
        return {
            "lost_updates": sum(self._lost) / len(self._lost) if self._lost else None,
            "crossed_bfloat16": total.share,
            "flipped_codes": self.flips.share,
            "layers": layer_changes(model, crossed, self.flips.layers),
        }


def layer_changes(model: LowBitModel, crossed: Mapping[str, Changed], flips: Mapping[str, Changed]) -> LayerChanges:
    """crossed: by master's name; flips: by layer's. Vectors (norms, biases) are left out: they are few and published
    as they are."""
    layer_of = {id(master): layer.layer for layer in model.low_bit_layers() for master in layer.masters}
    masters: dict[str, Changed] = {}
    for name, parameter in model.loaded.items():
        if id(parameter) in layer_of or len(whole_shape(parameter)) > 1:
            of_layer = masters.setdefault(layer_of.get(id(parameter), name.removesuffix(".weight")), Changed())
            of_layer.add(*((crossed[name].changed, crossed[name].count) if name in crossed else (0, 0)))
    if not (crossed or flips):
        return LayerChanges()
    return LayerChanges(
        layer=list(masters),
        flipped_codes=[flips[layer].share if layer in flips else None for layer in masters],
        crossed_bfloat16=[of_layer.share for of_layer in masters.values()],
    )
