"""A chart of metrics in `qarl report`, as data.

Imports nothing, so that the page can draw what a diagnostic asks for without loading torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Chart of metrics over steps, or of metrics that are lists if `axis` is given."""

    id: str
    """Identifier in the page."""
    title: str
    """Heading."""
    unit: str
    """Unit of all its metrics."""
    help: str
    """Text that explains the chart."""
    lines: dict[str, str]
    """Name of each line → its metric, as named in metrics.jsonl."""
    logarithmic: bool = False
    """Whether the metrics' axis is logarithmic."""
    axis: str | None = None
    """What the elements of the lists are numbered by, in words. None: the metrics are numbers."""
    places: str | None = None
    """Metric with the elements' positions on that axis. None: they are counted from 1."""
