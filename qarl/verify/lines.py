"""Reports as lines of a terminal."""

import textwrap

from qarl.verify.findings import Report


def outcome_lines(report: Report, width: int) -> list[str]:
    """Return a report's causes, what it did not compare and its verdict, as lines."""
    lines = [""]
    for cause in report.causes:
        lines += wrapped(f"{cause.level:<6}{cause.name}: ", cause.evidence, width)
        if cause.about:
            more = f" and {len(cause.about) - 4} more" if len(cause.about) > 4 else ""
            lines += wrapped("      in ", ", ".join(cause.about[:4]) + more, width)
        if cause.remedy:
            lines += wrapped("      -> ", cause.remedy, width)
    for text in report.unchecked:
        lines += wrapped("not compared: ", text, width)
    names = ", ".join(dict.fromkeys(cause.name for cause in report.faults))
    verdict = f"{report.compared} disagree: {names}"
    if report.agrees:
        verdict = f"{report.compared} agree in all that was compared"
    return [*lines, "", *wrapped("", verdict, width)]


def wrapped(label: str, text: str, width: int) -> list[str]:
    """Return a label and a text as lines, of which later ones are indented."""
    return textwrap.wrap(label + text, width, subsequent_indent="      ", break_on_hyphens=False)
