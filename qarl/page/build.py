"""Assembly of a report: data, styles and scripts in one HTML file.

A report depends on the contents of the runs' folders alone.
"""

import html
import json
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.page.figures import (
    curve_figures,
    digits,
    mismatch_figures,
    profile_figures,
    time_split,
)
from qarl.page.runs import Configuration, RecordedRun, configurations, shown_settings
from qarl.page.tokens import mismatch_columns, packed_tokens, treatment
from qarl.page.verdict import verdict
from qarl.report.finding import Finding
from qarl.report.token_files import TokenRows, read_step

MARK = "<!doctype html><!-- qarl report -->"
"""First characters of a report. A file that begins otherwise is never overwritten."""


def check_output(
    file: Path,
    option: str = "-o",
    mark: str = MARK,
    kind: str = "report",
    example: str = "report.html",
) -> None:
    """Raise `ConfigError` if `file` cannot be written, or is a file of another kind.

    To be called before the runs are read.

    Args:
        file: output file.
        option: command-line option that names the file.
        mark: first characters of a file that may be overwritten.
        kind: name of such a file's kind, for messages.
        example: example of a file's name, for messages.
    """
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a folder; name a file, such as {file / example}")
    if not file.parent.is_dir():
        raise ConfigError(
            f"{option} {file}: there is no folder {str(file.parent)!r}; make it first, or name"
            " another"
        )
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(
            f"{option} {file}: {str(file.parent)!r} cannot be written to; name a file elsewhere"
        )
    if file.exists():
        with file.open("rb") as stream:
            if stream.read(len(mark)) != mark.encode():
                raise ConfigError(
                    f"{option} {file} exists and is not a {kind}; name another file, or remove it"
                )


def report_page(runs: Sequence[RecordedRun]) -> str:
    """Return the page of some runs, as HTML.

    Raises `TokenFileError` if recorded tokens cannot be read.
    """
    kinds = configurations(runs)
    findings = verdict(kinds)
    title = "QaRL: " + ", ".join(run.name for kind in kinds for run in kind.runs)
    parts = {
        "title": html.escape(title),
        "heading": "",
        "verdict": verdict_html(findings, len(kinds)),
        "data": page_json(_data(kinds)),
    }
    return filled("report.html", ("tokens.js", "page.js"), parts)


def filled(
    sections: str,
    scripts: Sequence[str],
    parts: dict[str, str],
) -> str:
    """Return page.html with its placeholders filled in.

    Styles and basic scripts are those of all pages.

    Args:
        sections: asset with the page's sections.
        scripts: assets with the page's own scripts.
        parts: placeholder → HTML.
    """

    def asset(name: str) -> str:
        return (files("qarl.page") / name).read_text(encoding="utf-8")

    script = "\n".join(map(asset, ("elements.js", "charts.js", *scripts)))
    parts = {
        **parts,
        "sections": asset(sections),
        "style": asset("page.css"),
        "script": script,
    }
    text = asset("page.html")
    # All placeholders in one pass, so that a part that contains braces is not changed.
    return re.sub(r"\{\{(\w+)\}\}", lambda placeholder: parts[placeholder[1]], text)


def _data(kinds: Sequence[Configuration]) -> dict[str, Any]:
    """Return all data that the page's scripts draw."""
    runs = [run for kind in kinds for run in kind.runs]
    counts = sorted({str(run.config.record) for run in runs if run.token_files})
    recorded = "the recorded completions (those of least and most reward)"
    if counts == ["all"]:
        recorded = "all completions"
    # Rows of each run's steps, and of each configuration's.
    run_steps: list[list[TokenRows]] = []
    kind_steps: list[list[TokenRows]] = []
    for kind in kinds:
        steps_by_run = [_token_rows(run) for run in kind.runs]
        run_steps += steps_by_run
        kind_steps.append([rows for steps in steps_by_run for rows in steps])
    columns = [mismatch_columns(rows) for rows in kind_steps]
    settings, named = shown_settings(kinds)
    return {
        "kinds": [kind.label for kind in kinds],
        "runs": [_run(run, number) for number, kind in enumerate(kinds) for run in kind.runs],
        "curves": curve_figures(kinds),
        "time": time_split(kinds),
        "where": mismatch_figures(columns, recorded),
        "profiles": profile_figures(kinds),
        "treatment": treatment(kind_steps),
        "settings": [[name, *(values.get(name) for values in settings)] for name in named],
        "tokens": packed_tokens(run_steps),
    }


def _token_rows(run: RecordedRun) -> list[TokenRows]:
    return [read_step(file) for file in run.token_files.values()]


def _run(run: RecordedRun, kind: int) -> dict[str, Any]:
    """Return the facts of one run that the page shows. kind: number of its configuration."""
    last = run.metrics[-1]
    published = [m for m in run.metrics if m.get("digest")]
    canaries = [m["canary"] for m in run.metrics if m.get("canary") is not None]
    start_canary = run.start.canary if run.start else None
    if start_canary is not None:
        canaries.append(start_canary)
    measured = list(run.heldout().values())
    return {
        "of": kind,
        "name": run.name,
        "seed": run.config.seed,
        "aligned": run.config.learner.aligned,
        "diagnostics": run.config.learner.diagnostics_every,
        "steps": last["step"],
        "asked": run.config.steps,
        "reward": digits(last["reward"]),
        "heldout": f"{measured[0]} → {measured[-1]}" if measured else None,
        "deployed": run.deployed and str(run.deployed),
        "publishes": len(published),
        "digest": published[-1]["digest"] if published else None,
        "canaries": len(canaries),
        "canary": digits(max([*canaries, 0.0])),
        "audit": run.start and run.start.audit,
        "environment": run.environment,
    }


def verdict_html(findings: Sequence[Finding], headlines: int = 0) -> str:
    """Return findings as HTML list items, which can be read and searched without a script.

    headlines: number of findings, from the first, that are headlines.
    """
    words = {"good": "good", "note": "note", "warning": "look"}
    items = []
    for number, finding in enumerate(findings):
        about = f"<b>{html.escape(finding.about)}</b> " if finding.about else ""
        level = f'<span class="level">{words[finding.level]}</span>'
        style = f"{finding.level} headline" if number < headlines else finding.level
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        text = html.escape(f"{finding.text}{remedy}")
        # Numbers such as 1.2e-05 are not broken at the hyphen.
        text = re.sub(r"\S+e-\d+", r'<span class="whole">\g<0></span>', text)
        items.append(f'<li class="{style}">{level}<span>{about}{text}</span></li>')
    return "\n".join(items)


def page_json(data: Any) -> str:
    """Return data as JSON that is safe in a script element, whatever text is in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    escapes = {
        "<": "\\u003c",
        ">": "\\u003e",
        "&": "\\u0026",
        "\u2028": "\\u2028",
        "\u2029": "\\u2029",
    }
    return text.translate(str.maketrans(escapes))
