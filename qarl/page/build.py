"""A report, put together: data, styles and scripts in one file. A function of what the runs'
folders hold.
"""

import html
import json
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from qarl.advice.finding import Finding
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
from qarl.report.token_files import read_step

MARK = "<!doctype html><!-- qarl report -->"
"""What a report begins with, and nothing else is overwritten for."""


def check_output(
    file: Path,
    option: str = "-o",
    mark: str = MARK,
    kind: str = "report",
    example: str = "report.html",
) -> None:
    """Raise `ConfigError` where a report cannot be written to `file`, or something else would be
    lost by it; before the runs are read.

    option: that names the file. mark: what a file begins with that may be overwritten. kind: what
    such a file is. example: a name for one.
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
                    f"{option} {file} exists and is no {kind}; name another file, or remove it"
                )


def report_page(runs: Sequence[RecordedRun], refresh: int = 0) -> str:
    """The page of these runs. refresh: seconds after which a browser is to load it again; 0 for
    never. Raises `TokenFileError` for token columns that cannot be read.
    """
    kinds = configurations(runs)
    findings = verdict(kinds)
    title = "QaRL: " + ", ".join(run.name for kind in kinds for run in kind.runs)
    parts = {
        "title": html.escape(title),
        "heading": "",
        "refresh": f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "",
        "verdict": verdict_html(findings, len(kinds)),
        "data": page_json(_data(kinds)),
    }
    return filled("report.html", ("tokens.js", "page.js"), parts)


def filled(sections: str, scripts: Sequence[str], parts: dict[str, str]) -> str:
    """A page in one file: page.html with its parts and sections, with all pages' styles and scripts
    and its own.
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
    # once: what is put in is not looked through
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], text)


def _data(kinds: Sequence[Configuration]) -> dict[str, Any]:
    runs = [run for kind in kinds for run in kind.runs]
    counts = sorted({str(run.config.record) for run in runs if run.token_files})
    which = (
        "all completions"
        if counts == ["all"]
        else "the recorded completions (those of least and most reward)"
    )
    tokens = [
        [[read_step(file) for file in run.token_files.values()] for run in kind.runs]
        for kind in kinds
    ]
    steps = [[rows for of_run in of_kind for rows in of_run] for of_kind in tokens]
    columns = [mismatch_columns(rows) for rows in steps]
    settings, named = shown_settings(kinds)
    return {
        "kinds": [kind.label for kind in kinds],
        "runs": [_run(run, number) for number, kind in enumerate(kinds) for run in kind.runs],
        "curves": curve_figures(kinds),
        "time": time_split(kinds),
        "where": mismatch_figures(columns, which),
        "profiles": profile_figures(kinds),
        "treatment": treatment(steps),
        "settings": [[name, *(values.get(name) for values in settings)] for name in named],
        "tokens": packed_tokens([of_run for of_kind in tokens for of_run in of_kind]),
    }


def _run(run: RecordedRun, kind: int) -> dict[str, Any]:
    last, published = run.metrics[-1], [m for m in run.metrics if m.get("digest")]
    canaries = [m["canary"] for m in run.metrics if m.get("canary") is not None]
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
        "canaries": len(canaries) + bool(run.start and run.start.canary is not None),
        "canary": digits(max([*canaries, (run.start and run.start.canary) or 0.0])),
        "audit": run.start and run.start.audit,
        "environment": run.environment,
    }


def verdict_html(findings: Sequence[Finding], headlines: int = 0) -> str:
    """Text without a script: readable, searchable, printable. headlines: how many of the first
    are.
    """
    words = {"good": "good", "note": "note", "warning": "look"}
    items = []
    for place, finding in enumerate(findings):
        of = f"<b>{html.escape(finding.about)}</b> " if finding.about else ""
        level = f'<span class="level">{words[finding.level]}</span>'
        kind = f"{finding.level} headline" if place < headlines else finding.level
        said = html.escape(
            f"{finding.text}\n-> {finding.remedy}" if finding.remedy else finding.text
        )
        text = re.sub(r"\S+e-\d+", r'<span class="whole">\g<0></span>', said)
        items.append(f'<li class="{kind}">{level}<span>{of}{text}</span></li>')
    return "\n".join(items)


def page_json(data: Any) -> str:
    """JSON that ends no script element, whatever text is in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    escapes = {
        "<": "\\u003c",
        ">": "\\u003e",
        "&": "\\u0026",
        "\u2028": "\\u2028",
        "\u2029": "\\u2029",
    }
    return text.translate(str.maketrans(escapes))
