"""`qarl mismatch`'s page: probabilities, where they part, layers. Axes: n response tokens, B
sequences.
"""

import html
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from qarl.advice.finding import Finding, Level
from qarl.advice.mismatch import LayerDeviation, ScoredLearner
from qarl.page.build import filled, page_json, verdict_html
from qarl.page.figures import digits, mismatch_figures, thinned

POINTS = 1500
"""Of a scatter, a learner."""

FAULTY = 5.0
"""Times the median of the layers' kernel errors, from which on a layer is named."""

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
"""Nats an answer below which runs went so (docs/lab/map.md); what is said then, and its remedy."""

PLAIN_SUM = 1e-4
"""Relative kernel error that every sum in another order makes, so that no layer is named for it."""


def mismatch_page(
    title: str,
    lines: Sequence[Finding],
    learners: Sequence[ScoredLearner],
    layers: Sequence[LayerDeviation],
) -> str:
    """title: model, scheme and dtype. lines: in words, what the page begins with."""
    positions = [
        np.concatenate([np.arange(length) for length in each.lengths]) for each in learners
    ]
    columns = [
        (at, each.sampler, each.learner - each.sampler)
        for at, each in zip(positions, learners, strict=True)
    ]
    spread = mismatch_figures(columns, "all completions")
    data = {
        "kinds": [each.name for each in learners],
        "figures": [_probabilities(learners), *spread],
        "layers": _layer_figures(layers),
        "measured": _table(learners),
    }
    title = html.escape(f"QaRL mismatch: {title}")
    parts = {"title": title, "heading": f"<h2>{title}</h2>", "refresh": ""}
    return filled(
        "mismatch.html",
        ["mismatch.js"],
        {**parts, "verdict": verdict_html(lines), "data": page_json(data)},
    )


def findings(
    learners: Sequence[ScoredLearner], layers: Sequence[LayerDeviation], multiplies: str
) -> list[Finding]:
    """How far each learner is from the sampler, and by which layers. multiplies: what the aligned
    learner uses.
    """
    lines = [_apart(each) for each in learners] + [
        _worth(each) for each in learners if each.name == "plain"
    ]
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


def _apart(learner: ScoredLearner) -> Finding:
    apart, equal = learner.measured["mean_abs"], learner.measured["equal"]
    assert apart is not None
    assert equal is not None
    if equal == 1:
        return Finding("good", learner.name, "Equal to the sampler, to the last bit.")
    return Finding(
        "note",
        learner.name,
        f"{apart:.2g} nats a token from the sampler; {equal:.1%} of tokens are equal.",
    )


def _worth(plain: ScoredLearner) -> Finding:
    """What an aligned learner is worth over this one, by runs that began as far from their
    samplers.
    """
    nats = float((plain.sampler - plain.learner).sum()) / len(plain.lengths)
    _, level, known, remedy = next(row for row in _WORTH if nats < row[0])
    text = f"{nats:.2g} nats an answer between a plain learner and the sampler: {known}"
    return Finding(level, "aligned or not", text, remedy)


def faulty_layers(layers: Sequence[LayerDeviation]) -> list[LayerDeviation]:
    """Those whose product is off from their codes' values by far more than the others', the worst
    first.
    """
    if not layers:
        return []
    bound = max(PLAIN_SUM, FAULTY * median(row.kernel for row in layers))
    return sorted((row for row in layers if row.kernel > bound), key=lambda row: -row.kernel)


def _probabilities(learners: Sequence[ScoredLearner]) -> dict[str, Any]:
    lines = []
    for number, each in enumerate(learners):
        every = -(-len(each.sampler) // POINTS)
        x, y = (
            np.exp(values[::every].astype(np.float64)).tolist()
            for values in (each.sampler, each.learner)
        )
        lines.append(
            {
                "of": number,
                "name": each.name,
                "x": [*map(digits, x)],
                "y": [*map(digits, y)],
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
    columns = {
        "scheme": [row.scheme for row in layers],
        "kernel": [row.kernel for row in layers],
    }
    number = [float(n) for n in range(1, len(layers) + 1)]
    lines = [
        thinned({"of": 0, "name": name, "x": number, "y": values})
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
    names = [
        field
        for field in learners[0].measured
        if any(each.measured[field] is not None for each in learners)
    ]
    rows = [(name, [each.measured[name] for each in learners]) for name in names]
    return [
        [name, *(None if value is None else digits(value) for value in values)]
        for name, values in rows
    ]
