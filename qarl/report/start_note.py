"""What is known of a run before its first step, as JSON (`runs/NAME/start.json`): the audit, the canary, accuracy, and
what its diagnostics will have drawn."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from qarl.configs.errors import ConfigError
from qarl.learner.diagnostics.figure import Figure
from qarl.report.audit_table import audit_table
from qarl.report.run_folder import RunFolder
from qarl.sync.audit import AuditRow

if TYPE_CHECKING:
    from qarl.sync.publisher import Publish  # imports torch, which a reader of notes does without


@dataclass(frozen=True)
class StartNote:
    """audit: the audit's table, its first row the columns' names. canary: mean |Δ log p| of the first publish, nats.
    accuracy: held-out, of the policy the run started with; None where it was not measured. figures: of the learner's
    diagnostics."""

    audit: list[list[str]]
    canary: float | None
    accuracy: float | None
    figures: list[Figure]


def write_start(folder: RunFolder, rows: list[AuditRow], published: "Publish", accuracy: float | None) -> None:
    """Write the note of a run that has not begun. published: the version it begins with."""
    from qarl.learner.diagnostics.observers import OBSERVERS

    note = StartNote(
        audit=audit_table(rows).texts(),
        canary=published.canary and published.canary.mean_abs,
        accuracy=accuracy,
        figures=[figure for each in OBSERVERS for figure in each.figures],
    )
    folder.start.write_text(json.dumps(asdict(note), indent=1) + "\n")


def read_start(folder: RunFolder) -> StartNote | None:
    """None for a run without one, of an earlier version. Raises `ConfigError` for one that cannot be read."""
    if not folder.start.is_file():
        return None
    try:
        tree: dict[str, Any] = json.loads(folder.start.read_text())
        numbers = {name: None if tree[name] is None else float(tree[name]) for name in ("canary", "accuracy")}
        figures = [Figure(**figure) for figure in tree["figures"]]
        return StartNote(audit=[[str(cell) for cell in row] for row in tree["audit"]], figures=figures, **numbers)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(folder.start)!r} cannot be read ({error}); remove it to go on without") from error
