"""A chart of metrics in `qarl report`, as data. Imports nothing, so that the page draws what a
diagnostic asks for.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Metrics over steps, or, where `axis` is given, metrics that are lists.

    lines: name → metric, by its name in metrics.jsonl. unit: of all of them. logarithmic: their
    axis. axis: what the lists go over, in words. places: the metric that has the numbers on that
    axis; None: counted from 1.
    """

    id: str
    title: str
    unit: str
    help: str
    lines: dict[str, str]
    logarithmic: bool = False
    axis: str | None = None
    places: str | None = None
