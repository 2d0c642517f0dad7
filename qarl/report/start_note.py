"""What is known of a run before its first step, as JSON (`runs/NAME/start.json`): the audit, the
canary, accuracy, and what its diagnostics will have drawn.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from qarl.configs.errors import ConfigError
from qarl.learner.diagnostics.figure import Figure
from qarl.report.run_folder import RunFolder
from qarl.report.tables import PlainTable
from qarl.sync.audit import AuditRow

if TYPE_CHECKING:
    # imports torch, which a reader of notes does without
    from qarl.sync.publisher import Publish


@dataclass(frozen=True)
class StartNote:
    """audit: the audit's table, its first row the columns' names. canary: mean |Δ log p| of the
    first publish, nats. accuracy, heldout_reward: of the policy the run started with (`Heldout`);
    None where not measured. figures: of the learner's diagnostics.
    """

    audit: list[list[str]]
    canary: float | None
    accuracy: float | None
    figures: list[Figure]
    heldout_reward: float | None = None


def write_start(
    folder: RunFolder,
    rows: list[AuditRow],
    published: "Publish",
    accuracy: float | None,
    reward: float | None,
) -> None:
    """Write the note of a run that has not begun. published: the version it begins with."""
    from qarl.learner.diagnostics.observers import OBSERVERS

    note = StartNote(
        audit=audit_table(rows).texts(),
        canary=published.canary and published.canary.mean_abs,
        accuracy=accuracy,
        heldout_reward=reward,
        figures=[figure for each in OBSERVERS for figure in each.figures],
    )
    folder.start.write_text(json.dumps(asdict(note), indent=1) + "\n")


def read_start(folder: RunFolder) -> StartNote | None:
    """None for a run without one, of an earlier version. Raises `ConfigError` for one that cannot
    be read.
    """
    if not folder.start.is_file():
        return None
    try:
        tree: dict[str, Any] = json.loads(folder.start.read_text())
        tree = {"heldout_reward": None, **tree}
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
    """The audit as a table: layers that are alike, in name or in number, are one line."""
    by_number: dict[tuple[_Kind, str], list[str]] = {}
    for row in rows:
        numbers, name = _place(row.name)
        by_number.setdefault((_kind(row), name), []).append(numbers)
    alike: dict[tuple[_Kind, tuple[str, ...]], list[str]] = {}
    for (kind, name), numbers in by_number.items():
        alike.setdefault((kind, tuple(numbers)), []).append(name)
    same = all(kind.learner == kind.engine for kind, _ in by_number)
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
    """What layers on one line have in common. group: of the scheme's scales, "row" for one a row,
    "-" for none.
    """

    scheme: str
    group: str
    dtype: str
    learner: str
    engine: str


def _kind(row: AuditRow) -> _Kind:
    side = row.learner or row.engine
    assert side is not None
    group = str(side.group_size) if side.group_size else "row" if side.scheme != "bf16" else "-"
    learner, engine = (report.kernel if report else "-" for report in (row.learner, row.engine))
    dtype = side.dtype.removeprefix("torch.")
    return _Kind(scheme=side.scheme, group=group, dtype=dtype, learner=learner, engine=engine)


def _place(name: str) -> tuple[str, str]:
    """A layer's decoder layer, "" outside, and name in it: layers.3.mlp.experts.7.up_proj → "3",
    experts.*.up_proj.
    """
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if first is None:
        return "", name
    inner = ["*" if part.isdigit() else part for part in parts[first + 1 :]]
    return parts[first], ".".join(inner[1:] or inner)


def _spans(numbers: Iterable[str]) -> str:
    """Decoder layers' numbers as ranges: 0-3, 5."""
    spans: list[list[int]] = []
    for number in sorted({int(n) for n in numbers if n}):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans) or "-"
