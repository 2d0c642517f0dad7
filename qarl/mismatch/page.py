"""The page of `qarl mismatch`: probabilities, their differences by position, and layers.

Axes: n response tokens, B sequences.
"""

import html
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from qarl.mismatch.investigate import LayerDeviation, ScoredLearner
from qarl.page.build import filled, page_json, verdict_html
from qarl.page.figures import digits, mismatch_figures, thinned
from qarl.report.finding import Finding, Level

POINTS = 1500
"""Upper bound on a learner's points in a scatter plot."""

FAULTY = 5.0
"""Ratio of a layer's kernel error to the layers' median, above which the layer is reported."""

_WORTH: tuple[tuple[float, Level, str, str], ...] = (
    (
        10.0,
        "note",
        "in runs that began so near, alignment was worth 1 to 16 points.",
        "",
    ),
    (
        100.0,
        "note",
        (
            "in runs that began far apart (18 to 28 nats), an aligned learner ended 42 to 86 points"
            " above plain GRPO, and 3 to 9 above plain TBPO."
        ),
        (
            "train aligned, as is the default; calibrated codes (--scale kept --init gptq) begin"
            " nearer"
        ),
    ),
    (
        math.inf,
        "warning",
        "the scheme breaks the policy; where runs began so, none learned.",
        (
            "take a finer scheme (w4a16-g32, w8a8), or start from calibrated codes (--scale kept"
            " --init gptq)"
        ),
    ),
)
"""Upper bound of nats an answer, level, text and remedy; what runs showed (docs/lab/map.md)."""

PLAIN_SUM = 1e-4
"""Relative kernel error that another order of summation makes; no layer is reported below it."""


def mismatch_page(
    title: str,
    lines: Sequence[Finding],
    learners: Sequence[ScoredLearner],
    layers: Sequence[LayerDeviation],
) -> str:
    """Return the page as HTML.

    Args:
        title: model, scheme and dtype.
        lines: findings that the page begins with.
        learners: log-probs of each learner.
        layers: errors of each layer.
    """
    columns = []
    for learner in learners:
        positions = np.concatenate([np.arange(length) for length in learner.lengths])
        columns.append((positions, learner.sampler, learner.learner - learner.sampler))
    spread = mismatch_figures(columns, "all completions")
    data = {
        "kinds": [learner.name for learner in learners],
        "figures": [_probabilities(learners), *spread],
        "layers": _layer_figures(layers),
        "measured": _table(learners),
    }
    title = html.escape(f"QaRL mismatch: {title}")
    parts = {"title": title, "heading": f"<h2>{title}</h2>"}
    return filled(
        "mismatch.html",
        ["mismatch.js"],
        {**parts, "verdict": verdict_html(lines), "data": page_json(data)},
    )


def findings(
    learners: Sequence[ScoredLearner], layers: Sequence[LayerDeviation], multiplies: str
) -> list[Finding]:
    """Return how far each learner is from the sampler, and which layers cause it.

    multiplies: kernels of the aligned learner, in words.
    """
    lines = [_distance(learner) for learner in learners]
    lines += [_alignment_worth(learner) for learner in learners if learner.name == "plain"]
    lines.append(Finding("note", "", f"The aligned learner multiplied with {multiplies}."))
    faulty = faulty_layers(layers)
    for row in faulty:
        text = (
            f"{row.layer} multiplies otherwise than its codes say: its output is {row.kernel:.1%}"
            " off, where half of the layers are within"
            f" {median(each.kernel for each in layers):.2%}."
        )
        lines.append(Finding("warning", "", text))
    if not faulty and layers:
        worst = max(layers, key=lambda row: row.scheme)
        text = (
            f"No layer stands out by its kernel. The scheme costs most in {worst.layer}:"
            f" {worst.scheme:.1%} of its output, where half of the layers are within"
            f" {median(each.scheme for each in layers):.1%}."
        )
        lines.append(Finding("good", "", text))
    return lines


def _distance(learner: ScoredLearner) -> Finding:
    """Return how far a learner is from the sampler."""
    mean_abs = learner.measured["mean_abs"]
    equal = learner.measured["equal"]
    assert mean_abs is not None
    assert equal is not None
    if equal == 1:
        return Finding("good", learner.name, "Equal to the sampler, to the last bit.")
    return Finding(
        "note",
        learner.name,
        f"{mean_abs:.2g} nats a token from the sampler; {equal:.1%} of tokens are equal.",
    )


def _alignment_worth(plain: ScoredLearner) -> Finding:
    """Return what an aligned learner gains over a plain one, by runs of a similar distance."""
    nats = float((plain.sampler - plain.learner).sum()) / len(plain.lengths)
    _, level, experience, remedy = next(row for row in _WORTH if nats < row[0])
    text = f"{nats:.2g} nats an answer between a plain learner and the sampler: {experience}"
    return Finding(level, "aligned or not", text, remedy)


def faulty_layers(layers: Sequence[LayerDeviation]) -> list[LayerDeviation]:
    """Return the layers whose kernel error is far larger than the others', the worst first."""
    if not layers:
        return []
    bound = max(PLAIN_SUM, FAULTY * median(row.kernel for row in layers))
    beyond = (row for row in layers if row.kernel > bound)
    return sorted(beyond, key=lambda row: -row.kernel)


def _probabilities(learners: Sequence[ScoredLearner]) -> dict[str, Any]:
    """Return a scatter plot of learners' probabilities over the sampler's."""
    lines = []
    for number, learner in enumerate(learners):
        every = -(-len(learner.sampler) // POINTS)
        sampler_probs = np.exp(learner.sampler[::every].astype(np.float64)).tolist()
        learner_probs = np.exp(learner.learner[::every].astype(np.float64)).tolist()
        lines.append(
            {
                "of": number,
                "name": learner.name,
                "x": [*map(digits, sampler_probs)],
                "y": [*map(digits, learner_probs)],
            }
        )
    return {
        "id": "probabilities",
        "title": "Probabilities",
        "x": "sampler's probability",
        "unit": "",
        "points": True,
        "help": (
            "Each sampled token: the learner's probability over the sampler's. On the diagonal they"
            " agree."
        ),
        "log": False,
        "lines": lines,
    }


def _layer_figures(layers: Sequence[LayerDeviation]) -> list[dict[str, Any]]:
    """Return the figure of the layers' errors; an empty list if all errors are 0."""
    columns = {
        "scheme": [row.scheme for row in layers],
        "kernel": [row.kernel for row in layers],
    }
    numbers = [float(n) for n in range(1, len(layers) + 1)]
    lines = [
        thinned({"of": 0, "name": name, "x": numbers, "y": values})
        for name, values in columns.items()
        if any(values)
    ]
    figure = {
        "id": "layers",
        "title": "Relative error of each layer's output",
        "x": "layer, in the model's order",
        "unit": "share",
        "log": True,
        "lines": lines,
        "labels": [row.layer for row in layers],
        "fixed": True,
        "help": (
            "On the inputs of an unquantized forward. scheme: the codes' values against the master;"
            " kernel: the aligned product against those values."
        ),
    }
    return [figure] if lines else []


def _table(learners: Sequence[ScoredLearner]) -> list[list[Any]]:
    """Return a row for each mismatch metric that any learner has: its name, and the values."""
    rows = []
    for name in learners[0].measured:
        values = [learner.measured[name] for learner in learners]
        if any(value is not None for value in values):
            rows.append([name, *(None if value is None else digits(value) for value in values)])
    return rows
