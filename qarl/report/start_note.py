"""The facts known about a run before its first step, as JSON (`runs/NAME/start.json`).

They are the audit, the first publish's canary, held-out accuracy, and the figures that the
learner's diagnostics will draw.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from qarl.configs.errors import ConfigError
from qarl.evaluation.heldout import Heldout
from qarl.learner.diagnostics.figure import Figure
from qarl.report.run_folder import RunFolder
from qarl.report.tables import PlainTable
from qarl.sync.audit import AuditRow

if TYPE_CHECKING:
    # It imports torch, which reading a note does not need.
    from qarl.sync.publisher import Publish


@dataclass(frozen=True)
class StartNote:
    """The facts known about a run before its first step."""

    audit: list[list[str]]
    """Rows of the audit's table; the first has the columns' names."""

    canary: float | None
    """Mean |Δ log p| of the first publish, in nats; None if it had no canary."""

    accuracy: float | None
    """Held-out accuracy (`Heldout`) of the initial policy; None if not measured."""

    figures: list[Figure]
    """Figures that the learner's diagnostics draw in a report."""

    heldout_reward: float | None = None
    """Held-out reward (`Heldout`) of the initial policy; None if not measured."""


def write_start(
    folder: RunFolder,
    rows: list[AuditRow],
    published: "Publish",
    measured: Heldout | None,
) -> None:
    """Write the note of a run that has not begun.

    Args:
        folder: folder of the run.
        rows: layers that the audit compared.
        published: the first published version.
        measured: held-out figures of the initial policy, or None.
    """
    from qarl.learner.diagnostics.observers import OBSERVERS

    note = StartNote(
        audit=audit_table(rows).texts(),
        canary=published.canary and published.canary.mean_abs,
        accuracy=measured and measured.accuracy,
        heldout_reward=measured and measured.reward,
        figures=[figure for each in OBSERVERS for figure in each.figures],
    )
    folder.start.write_text(json.dumps(asdict(note), indent=1) + "\n")


def read_start(folder: RunFolder) -> StartNote | None:
    """Read the note of a run; None if the run has none.

    Raises `ConfigError` if the note is damaged.
    """
    if not folder.start.is_file():
        return None
    try:
        tree: dict[str, Any] = json.loads(folder.start.read_text())
        measured = ("canary", "accuracy", "heldout_reward")
        numbers = {name: None if tree[name] is None else float(tree[name]) for name in measured}
        figures = [Figure(**figure) for figure in tree["figures"]]
        return StartNote(
            audit=[[str(cell) for cell in row] for row in tree["audit"]],
            figures=figures,
            **numbers,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(folder.start)!r} cannot be read ({error}); remove it to go on without"
        ) from error


def audit_table(rows: list[AuditRow]) -> PlainTable:
    """Return the audit as a table, with one line for layers that are alike.

    Layers are alike if learner and engine treat them equally. One line has the same names in
    several decoder layers, or several names.
    """
    by_name: dict[tuple[_Kind, str], list[str]] = {}
    for row in rows:
        number, name = _split_name(row.name)
        by_name.setdefault((_kind(row), name), []).append(number)
    alike: dict[tuple[_Kind, tuple[str, ...]], list[str]] = {}
    for (kind, name), numbers in by_name.items():
        alike.setdefault((kind, tuple(numbers)), []).append(name)
    same = all(kind.learner == kind.engine for kind, _ in by_name)
    sides = ("kernel of both",) if same else ("learner's kernel", "engine's kernel")
    table = PlainTable(
        "decoder layers",
        "matrices",
        "count",
        "scheme",
        "group",
        "dtype",
        *sides,
        figures=("count", "group"),
        title="layers, as learner and engine have them",
    )
    for (kind, numbers), names in alike.items():
        kernels = (kind.learner,) if same else (kind.learner, kind.engine)
        count = len(names) * len(numbers)
        table.add_row(
            _spans(numbers),
            ", ".join(names),
            str(count),
            kind.scheme,
            kind.group,
            kind.dtype,
            *kernels,
        )
    return table


class _Kind(NamedTuple):
    """The facts that layers on one line have in common."""

    scheme: str
    """Name of the scheme."""

    group: str
    """Columns that share a scale; "row" for one scale a row, "-" for none."""

    dtype: str
    """Compute dtype."""

    learner: str
    """Kernel of the learner, "-" if it does not have the layer."""

    engine: str
    """Kernel of the engine, "-" if it does not have the layer."""


def _kind(row: AuditRow) -> _Kind:
    side = row.learner or row.engine
    assert side is not None
    per_row = "row" if side.scheme != "bf16" else "-"
    return _Kind(
        scheme=side.scheme,
        group=str(side.group_size) if side.group_size else per_row,
        dtype=side.dtype.removeprefix("torch."),
        learner=row.learner.kernel if row.learner else "-",
        engine=row.engine.kernel if row.engine else "-",
    )


def _split_name(name: str) -> tuple[str, str]:
    """Split a layer's name into the number of its decoder layer and its name within that.

    layers.3.mlp.experts.7.up_proj gives "3" and experts.*.up_proj. The number is "" outside of
    decoder layers.
    """
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if first is None:
        return "", name
    inner = ["*" if part.isdigit() else part for part in parts[first + 1 :]]
    return parts[first], ".".join(inner[1:] or inner)


def _spans(numbers: Iterable[str]) -> str:
    """Format the numbers of decoder layers as ranges: 0-3, 5."""
    spans: list[list[int]] = []
    for number in sorted({int(n) for n in numbers if n}):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans) or "-"
