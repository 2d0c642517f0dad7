"""The audit before step 0, which compares the layers of learner and engine.

It compares what the learner will multiply with and what the engine reports, layer by layer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl.configs.errors import QarlError
from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT
from qarl.quant.types import LayerReport

if TYPE_CHECKING:
    # These import torch, which a reader of audits does not need.
    from qarl.quant.model.operator_check import OperatorCheck
    from qarl.quant.model.row_check import RowCheck


class AuditError(QarlError, heading="audit"):
    """Learner and engine disagree about a layer, so training would optimize another policy than it
    samples.
    """


@dataclass(frozen=True)
class AuditRow:
    """One layer as the learner and as the engine see it."""

    name: str
    """Name of the layer."""
    learner: LayerReport | None
    """The learner's report; None if it does not know the layer."""
    engine: LayerReport | None
    """The engine's report; None if it does not know the layer."""
    problem: str
    """The disagreement, in words; "" if they agree."""


def audit(
    learner: list[LayerReport],
    engine: list[LayerReport],
    same_kernels: bool,
    same_bits: bool = False,
) -> list[AuditRow]:
    """Pair the reports by layer name.

    Args:
        same_kernels: whether a different kernel is a disagreement (it is when the learner claims
            the engine's kernels).
        same_bits: whether a kernel whose sums may depend on the batch is a disagreement (on GPUs,
            with `bitwise`).
    """
    by_learner = {layer.name: layer for layer in learner}
    by_engine = {layer.name: layer for layer in engine}
    names = list(by_learner) + [name for name in by_engine if name not in by_learner]
    return [
        _compare(name, by_learner.get(name), by_engine.get(name), same_kernels, same_bits)
        for name in names
    ]


def require_agreement(rows: list[AuditRow]) -> None:
    """Raise `AuditError` if layers disagree, naming them and their problems."""
    wrong = [row for row in rows if row.problem]
    if wrong:
        shown = "\n".join(f"  {row.name}: {row.problem}" for row in wrong[:8])
        more = f"\n  … and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise AuditError(
            f"learner and engine disagree about {len(wrong)} of {len(rows)}"
            f" layers:\n{shown}{more}\ncheck that both were given the same scheme and layer rules,"
            " and that vLLM did not fall back for these shapes"
        )


def require_equal_rows(checked: "RowCheck") -> None:
    """Raise `AuditError` if a kernel's result for a row depends on the other rows.

    `bitwise` forbids that.
    """
    if checked.dependent:
        raise AuditError(
            f"bitwise, and {checked}; choose another dtype or scheme (float16 and the int8 schemes"
            " depend on the rows beside a row least), or omit bitwise"
        )


def require_right_operators(checked: "OperatorCheck") -> None:
    """Raise `AuditError` if vLLM's model is another one than transformers', beyond rounding."""
    if checked.wrong:
        raise AuditError(
            f"{checked}. vLLM, which samples, would compute another model than the checkpoint's,"
            " and the learner with it; nothing else shows that, because both call the same"
            " operators. Look whether config.json has every field that the model's publisher wrote,"
            " take a release of vLLM with which qarl was tested, or another model, and report this"
            " one"
        )


def _compare(
    name: str,
    learner: LayerReport | None,
    engine: LayerReport | None,
    same_kernels: bool,
    same_bits: bool,
) -> AuditRow:
    """Compare one layer's reports."""
    if learner is None or engine is None:
        problem = f"known to the {'engine' if learner is None else 'learner'} only"
    else:
        fields = ["scheme", "group_size", "dtype"]
        if same_kernels:
            fields.append("kernel")
        differences = [
            f"{field} {getattr(learner, field)!r} (learner) and {getattr(engine, field)!r} (engine)"
            for field in fields
            if getattr(learner, field) != getattr(engine, field)
        ]
        problem = _different_ignore_lists(learner, engine) or ", ".join(differences)
        if same_bits and not problem and BATCH_INVARIANT not in engine.kernel:
            problem = (
                f"kernel {engine.kernel!r} is not known to be batch-invariant, as `bitwise` asks"
            )
    return AuditRow(name, learner, engine, problem)


def _different_ignore_lists(learner: LayerReport, engine: LayerReport) -> str:
    """Return a message if one side alone leaves the layer in the compute dtype, else ""."""
    sides = {"learner": learner.scheme, "engine": engine.scheme}
    ignoring = [side for side, scheme in sides.items() if scheme == "bf16"]
    if len(ignoring) != 1:
        return ""
    (quantizing,) = sides.keys() - ignoring
    return (
        f"different ignore lists: the {ignoring[0]} leaves this layer in the compute dtype, the"
        f" {quantizing} quantizes it in {sides[quantizing]!r}"
    )
