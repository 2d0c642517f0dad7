"""Before step 0: what the learner will multiply with, against what the engine reports, layer by
layer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl.configs.errors import QarlError
from qarl.quant.runtime.batch_invariance import BATCH_INVARIANT
from qarl.quant.types import LayerReport

if TYPE_CHECKING:
    # imports torch, which a reader of audits does without
    from qarl.quant.model.row_check import RowCheck


class AuditError(QarlError, heading="audit"):
    """Learner and engine disagree about a layer; training would optimize another policy than it
    samples.
    """


@dataclass(frozen=True)
class AuditRow:
    """One layer on both sides; a side is None where it does not know the layer. problem: "" where
    they agree.
    """

    name: str
    learner: LayerReport | None
    engine: LayerReport | None
    problem: str


def audit(
    learner: list[LayerReport],
    engine: list[LayerReport],
    same_kernels: bool,
    same_bits: bool = False,
) -> list[AuditRow]:
    """Pair the reports by layer name.

    same_kernels: whether a different kernel is a disagreement (it is when the learner claims the
    engine's kernels). same_bits: whether a kernel whose sums may depend on the batch is a
    disagreement (on GPUs, with `bitwise`).
    """
    ours, theirs = ({layer.name: layer for layer in side} for side in (learner, engine))
    names = list(ours) + [name for name in theirs if name not in ours]
    return [
        _compare(name, ours.get(name), theirs.get(name), same_kernels, same_bits) for name in names
    ]


def require_agreement(rows: list[AuditRow]) -> None:
    """Raise `AuditError` naming the layers that disagree, and how."""
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
    """Raise `AuditError` where a kernel computes a row otherwise beside other rows, as `bitwise`
    forbids.
    """
    if checked.dependent:
        raise AuditError(
            f"bitwise, and {checked}; choose another dtype or scheme (float16 and the int8 schemes"
            " depend on the rows beside a row least), or leave bitwise out"
        )


def _compare(
    name: str,
    ours: LayerReport | None,
    theirs: LayerReport | None,
    same_kernels: bool,
    same_bits: bool,
) -> AuditRow:
    if ours is None or theirs is None:
        problem = f"known to the {'engine' if ours is None else 'learner'} only"
    else:
        fields = [
            "scheme",
            "group_size",
            "dtype",
            *(["kernel"] if same_kernels else []),
        ]
        differing = [f for f in fields if getattr(ours, f) != getattr(theirs, f)]
        problem = _different_ignore_lists(ours, theirs) or ", ".join(
            f"{f} {getattr(ours, f)!r} (learner) and {getattr(theirs, f)!r} (engine)"
            for f in differing
        )
        if same_bits and not problem and BATCH_INVARIANT not in theirs.kernel:
            problem = (
                f"kernel {theirs.kernel!r} is not known to be batch-invariant, as `bitwise` asks"
            )
    return AuditRow(name, ours, theirs, problem)


def _different_ignore_lists(ours: LayerReport, theirs: LayerReport) -> str:
    """In words, where one side quantizes a layer that the other leaves in the compute dtype; ""
    elsewhere.
    """
    sides = {"learner": ours.scheme, "engine": theirs.scheme}
    leaving = [side for side, scheme in sides.items() if scheme == "bf16"]
    if len(leaving) != 1:
        return ""
    (other,) = sides.keys() - leaving
    return (
        f"different ignore lists: the {leaving[0]} leaves this layer in the compute dtype, the"
        f" {other} quantizes it in {sides[other]!r}"
    )
